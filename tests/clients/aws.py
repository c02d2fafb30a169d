"""Prints the credentials and region that boto3 gets when the metadata service is its only source."""
import json
import os

# The session reads these when it starts: its time-outs, and no configuration files of this machine.
os.environ["AWS_METADATA_SERVICE_TIMEOUT"], os.environ["AWS_METADATA_SERVICE_NUM_ATTEMPTS"] = "10", "3"
os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull

import boto3  # noqa: E402
from botocore.utils import InstanceMetadataRegionFetcher  # noqa: E402

credentials = boto3.Session().get_credentials()
keys = credentials and credentials.get_frozen_credentials()
print(
    json.dumps(
        {
            "method": credentials and credentials.method,
            "access_key": keys and keys.access_key,
            "secret_key": keys and keys.secret_key,
            "token": keys and keys.token,
            "region": InstanceMetadataRegionFetcher(timeout=10, num_attempts=3).retrieve_region(),
        }
    )
)
