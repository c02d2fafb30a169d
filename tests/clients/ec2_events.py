"""Asks ec2-metadata until the VM is to be preempted and is being terminated, and prints what it then says."""
import json
import time

from ec2_metadata import ec2_metadata as vm

while vm.spot_instance_action is None or vm.autoscaling_target_lifecycle_state is None:
    time.sleep(0.1)
action = vm.spot_instance_action
print(
    json.dumps(
        {
            "action": action.action,
            "time": action.time.isoformat(),
            "lifecycle": vm.autoscaling_target_lifecycle_state,
        }
    )
)
