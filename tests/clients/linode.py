"""Prints what Linode's own client library gets. It takes a token, asks for JSON, and reads user-data as text."""
import dataclasses
import json

from linode_metadata import MetadataClient

client = MetadataClient()
client.check_connection()
print(
    json.dumps(
        {
            "instance": dataclasses.asdict(client.get_instance()),
            "network": dataclasses.asdict(client.get_network()),
            "keys": client.get_ssh_keys().users,
            "user_data": client.get_user_data(),
        }
    )
)
