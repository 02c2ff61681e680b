"""One module per parallel API: the mixins that give it ``sharded_state_dict``, and ``install``."""
