"""Prints for each cloud that cloud-detect knows whether its metadata server is there."""
import asyncio
import json

from cloud_detect.providers import (
    AlibabaProvider,
    AWSProvider,
    AzureProvider,
    DOProvider,
    GCPProvider,
    OCIProvider,
    VultrProvider,
)

CLOUDS = [AlibabaProvider, AWSProvider, AzureProvider, DOProvider, GCPProvider, OCIProvider, VultrProvider]


async def found():
    return {cloud.identifier: bool(await cloud().check_metadata_server()) for cloud in CLOUDS}


print(json.dumps(asyncio.run(found())))
