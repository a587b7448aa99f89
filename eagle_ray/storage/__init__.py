"""Files on local disks and in object storage, with atomic and conditional writes, and the files of models."""
