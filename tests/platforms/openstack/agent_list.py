"""Prints what `openstack network agent list` would show of a southbound database: `agent_list.py REMOTE NB_CFG`.

Rows come by OVN's own client, and are judged by Neutron's own cache of agents.
"""

import json
import sys
import types

import ovs.db.idl
from neutron.common.ovn import constants
from neutron.plugins.ml2.drivers.ovn.agent import neutron_agent
from oslo_config import cfg
from ovsdbapp.backend.ovs_idl import connection, idlutils

remote, nb_cfg = sys.argv[1], int(sys.argv[2])
# What counts is the number that each agent has seen, and not for how long it has been silent.
cfg.CONF.set_override("agent_down_time", 0)
helper = idlutils.get_schema_helper(remote, "OVN_Southbound")
for table in "Chassis", "Chassis_Private":
    helper.register_table(table)
idl = ovs.db.idl.Idl(remote, helper, leader_only=False)
connection.Connection(idl, timeout=10).start()

northbound = types.SimpleNamespace(nb_global=types.SimpleNamespace(nb_cfg=nb_cfg))
cache = neutron_agent.AgentCache(types.SimpleNamespace(nb_ovn=northbound))
for row in idl.tables["Chassis_Private"].rows.values():
    cache.update(constants.OVN_CONTROLLER_AGENT, row)
    if constants.OVN_AGENT_METADATA_ID_KEY in row.external_ids:
        cache.update(constants.OVN_METADATA_AGENT, row)
shown = "agent_type", "binary", "host", "id", "alive"
agents = [agent.as_dict() for agent in cache]
print(json.dumps([{key: agent[key] for key in shown} for agent in agents]))
