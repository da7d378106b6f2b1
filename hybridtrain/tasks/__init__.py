"""The tasks that ship with hybridtrain: ordinary Lightning modules and data modules."""
