"""Prints what ec2-metadata, a client library of EC2, reads with a session token."""
import json

from ec2_metadata import ec2_metadata as vm

nics = vm.network_interfaces
print(
    json.dumps(
        {
            "account_id": vm.account_id,
            "ami_id": vm.ami_id,
            "ami_launch_index": vm.ami_launch_index,
            "ami_manifest_path": vm.ami_manifest_path,
            "availability_zone": vm.availability_zone,
            "availability_zone_id": vm.availability_zone_id,
            "autoscaling": vm.autoscaling_target_lifecycle_state,
            "domain": vm.domain,
            "iam": vm.iam_security_credentials and vm.iam_security_credentials["AccessKeyId"],
            "iam_name": vm.instance_profile_name,
            "instance_action": vm.instance_action,
            "instance_id": vm.instance_id,
            "instance_life_cycle": vm.instance_life_cycle,
            "instance_type": vm.instance_type,
            "kernel_id": vm.kernel_id,
            "mac": vm.mac,
            "partition": vm.partition,
            "private_hostname": vm.private_hostname,
            "private_ipv4": vm.private_ipv4,
            "public_hostname": vm.public_hostname,
            "public_ipv4": vm.public_ipv4,
            "public_keys": {name: key.openssh_key for name, key in vm.public_keys.items()},
            "region": vm.region,
            "reservation_id": vm.reservation_id[:2],
            "security_groups": vm.security_groups,
            "spot": vm.spot_instance_action,
            "tags": dict(vm.tags),
            "user_data": vm.user_data.decode(),
            "nics": {
                mac: {
                    "device_number": nic.device_number,
                    "id": nic.interface_id[:4],
                    "ipv4_associations": nic.ipv4_associations,
                    "ipv6_prefix": nic.ipv6_prefix,
                    "ipv6s": nic.ipv6s,
                    "owner_id": nic.owner_id,
                    "private_hostname": nic.private_hostname,
                    "private_ipv4s": nic.private_ipv4s,
                    "public_hostname": nic.public_hostname,
                    "public_ipv4s": nic.public_ipv4s,
                    "security_groups": nic.security_groups,
                    "security_group_ids": len(nic.security_group_ids),
                    "subnet_id": nic.subnet_id[:7],
                    "subnet_ipv4_cidr_block": nic.subnet_ipv4_cidr_block,
                    "subnet_ipv6_cidr_blocks": nic.subnet_ipv6_cidr_blocks,
                    "vpc_id": nic.vpc_id[:4],
                    "vpc_ipv4_cidr_block": nic.vpc_ipv4_cidr_block,
                    "vpc_ipv4_cidr_blocks": nic.vpc_ipv4_cidr_blocks,
                    "vpc_ipv6_cidr_blocks": nic.vpc_ipv6_cidr_blocks,
                }
                for mac, nic in nics.items()
            },
        }
    )
)
