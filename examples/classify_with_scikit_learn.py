"""Virtual covariance learning as a scikit-learn classifier, and target linearity as a score."""

from sklearn.datasets import load_wine
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gramscope.integrations.sklearn import TargetLinearityScorer, VCLClassifier

X, y = load_wine(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

classifier = VCLClassifier(hidden_layer_sizes=(32,), max_epochs=60, random_state=0).fit(X_train, y_train)
mlp = make_pipeline(StandardScaler(), MLPClassifier(max_iter=500, random_state=0)).fit(X_train, y_train)
print(f"test accuracy: VCL {classifier.score(X_test, y_test):.3f}, MLP {mlp.score(X_test, y_test):.3f}")

grid = GridSearchCV(
    VCLClassifier(hidden_layer_sizes=(16,), max_epochs=20, random_state=0),
    {"gamma": [0.01, 0.1]},
    scoring={"accuracy": "accuracy", "linearity": TargetLinearityScorer()},
    refit="accuracy",
    cv=3,
).fit(X_train, y_train)
for gamma, score in zip(grid.cv_results_["param_gamma"], grid.cv_results_["mean_test_linearity"], strict=True):
    print(f"gamma {gamma}: target linearity of the hidden features {score:.3f}")
