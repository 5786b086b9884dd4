"""Several processes of ``torch.distributed``: their groups, what they send each other, and models sharded over them."""
