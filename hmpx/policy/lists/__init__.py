"""Op lists: their kinds, their files, the shipped ones, and their faults."""
