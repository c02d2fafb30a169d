//! The agent on a node of KubeVirt, and what a cluster deploys.

mod injection;
mod kubevirt_feed;
mod kubevirt_imds_compat;
mod kubevirt_node;
mod manifests;
mod quiet_in_pods;
