//! Unmodified guest agents other than cloud-init apply the record. Each runs in its own root file system.

#[path = "guest_agents/afterburn.rs"]
mod afterburn;
#[path = "guest_agents/clouds.rs"]
mod clouds;
#[path = "guest_agents/google.rs"]
mod google;
#[path = "guest_agents/ignition.rs"]
mod ignition;
#[path = "guest_agents/net_utils.rs"]
mod net_utils;
#[path = "guest_agents/node.rs"]
mod node;
#[path = "guest_agents/tools.rs"]
mod tools;
