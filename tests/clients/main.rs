//! Unmodified clients of the clouds find in the agent what they look for.

mod azure_agent;
mod cloud_init_crawls;
mod cloud_init_networks;
mod events;
mod guest_agents;
mod identity;
mod other_clients;
mod systemd_imds;
