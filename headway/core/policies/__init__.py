"""The departure policies, one file each."""
