"""The laboratory of gramscope: runs, pictures, published figures and the command ``gramscope``.

It needs the extra ``lab``: ``pip install 'gramscope[lab]'``. The library ``gramscope`` never imports it.
"""
