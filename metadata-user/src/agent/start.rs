//! From a configuration to a running node.

use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use metadata_common::maps::MAX_SLOTS;

use super::node::Node;
use super::state::State;
use crate::afxdp::{Socket, SocketConfig};
use crate::config::Config;
use crate::link::HubTap;
use crate::serve::{Serve, ServeConfig};
use crate::stack::{Stack, StackConfig};
use crate::steer::{SteerConfig, Steering};
use crate::store::Store;
use crate::worker::{Worker, WorkerConfig};

/// Serves until a signal ends the agent.
///
/// # Errors
/// Something the node needs cannot be had: privileges, a kernel feature, the hub's devices, the metrics
/// address. Nothing is left behind then.
pub fn serve(config: &Config) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Before there is anything to clean up: a signal that comes meanwhile waits for the loop.
        let stop = super::Stop::new()?;
        let (state, errands) = State::open(config)?;
        let node = start(config, state)?;
        super::run(config, node, errands, stop).await
    })
}

/// Makes hub, socket and worker; from here on frames are served, as soon as a port is attached.
fn start(config: &Config, state: State) -> anyhow::Result<Node> {
    let mut steering = Steering::start(&SteerConfig {
        hub: config.hub.clone(),
        served: config.addresses.clone(),
        arp_only: config.next_hops(),
        limits: config.limits,
    })?;
    let (ifindex, queue) = (steering.hub().inner_ifindex, steering.hub().queue);
    let socket = Socket::bind(ifindex, queue, &SocketConfig::default())
        .with_context(|| format!("binding the AF_XDP socket to {}", steering.hub().inner_name))?;
    steering.register_socket(socket.as_fd())?;
    let tap = HubTap::new(steering.take_tap());
    steering.forward_logs();

    let store = Arc::new(Store::new(MAX_SLOTS));
    let service = Serve::new(Arc::clone(&store), ServeConfig::default());
    let stack = Stack::new(
        StackConfig {
            served: config.addresses.clone(),
            arp_only: config.next_hops(),
            seed: RandomState::new().hash_one(0),
            ..StackConfig::default()
        },
        service,
    );
    let worker_config =
        WorkerConfig { spin: Duration::from_micros(config.spin_us.into()), ..WorkerConfig::default() };
    let worker = Worker::spawn(worker_config, socket, tap, stack)?;
    Ok(Node::new(steering, store, worker, state))
}
