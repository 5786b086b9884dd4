"""Run directories: what training writes and the report reads.

    config.toml       what to run; its first line marks a directory of gramscope
    environment.json  versions, machine, device, git state
    records.jsonl     evaluations and measurements, one JSON object a line: appended and flushed to disk
    measured.jsonl    measurements of checkpoints made after training, in the same form
    checkpoints/      step-000000123.safetensors: model, training state and a digest of both in one file
    artefacts/        matrices for the report (spectra, diagonals), one safetensors file each
    figures/          PNG, PDF, HTML
    lock.json         host, process and start time of the writer, while there is one

A directory whose sub-directories are run directories is a *group*. Reading a group reads its members.

:class:`~gramscope_lab.runs.directory.RunDirectory` is the way to all of it::

    run = RunDirectory.create(path, config)        # or RunDirectory.open(path)
    with run.lock:                                 # writers take it, readers never do
        run.append({"kind": "evaluation", "step": 1, "test_loss": 0.5})
        run.save_checkpoint(1, model.state_dict(), {"optimizer": optimizer.state_dict(), "epoch": 0})
        run.save_artefact("spectra-000000001", {"fc": singular_values})

    run.iter_records("evaluation")                 # one after the other, whatever the size of the file
    run.records("evaluation")                      # a list; a group's records name their member as ``run``
    checkpoint = run.load_checkpoint()             # the newest intact one: step, model, state
    run.rewind(checkpoint)                         # forget what was written after it; None: everything
    run.load_artefact("spectra-000000001")
    run.status(), run.config, run.environment, run.members(), run.runs()

The state of a checkpoint is any nesting of dicts, lists, tuples, numbers, texts and tensors. A checkpoint knows how many
bytes of records belong to it. Nothing is kept open between calls.
"""
