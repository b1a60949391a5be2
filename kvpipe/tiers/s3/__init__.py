"""The object store tier: S3, Google Cloud Storage, Azure."""
