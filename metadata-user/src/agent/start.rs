//! Starts the agent of a configuration, and runs it to its end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use metadata_common::answer;
use metadata_common::cookie::CookieKey;
use metadata_common::maps::{ANSWER_LINK, ANSWER_REQUESTS, ANSWER_TCP, MAX_SLOTS};
use metadata_common::siphash::SipKey;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

use super::control::{ControlLoop, EndReason, StartState};
use super::documents::{DocumentPublisher, DocumentSources};
use super::drain::LingerResources;
use super::endpoint::make_run;
use super::handover::{HandoverState, Takeover};
use super::node::{AnswerPublisher, Node, NodePorts, RecordCatalogue, Reporter, TapGuard, Workers};
use super::preflight;
use super::reload::ConfigSource;
use super::service_manager::Stop;
use super::state::NodeState;
use crate::config::Config;
use crate::identity;
use crate::service::audit::Collector;
use crate::service::{HandoverAnswers, MetadataService, RequestReports, WorkerCounts};
use metadata_content::on_demand::OnDemand;
use metadata_content::store::Store;
use metadata_datapath::afxdp::{AfxdpError, Queues, SocketConfig};
use metadata_datapath::link::{AlternatingSources, HubTap};
use metadata_datapath::sandbox::{SandboxMode, SandboxStage};
use metadata_datapath::stack::{RECEIVE_BUFFER, Stack, StackConfig, StackStats};
use metadata_datapath::worker::{WorkerConfig, WorkerHandle, WorkerLauncher};
use metadata_feed::libvirt;
use metadata_feed::memory_budget::MemoryBudget;
use metadata_steer::{Hub, PreviousAgent, SteerConfig, Steering, hub_queues};

/// How long to wait at the end for files that are being written.
const LAST_WRITES: Duration = Duration::from_secs(5);

/// Whether to take over from another agent on the node, and what to do after a takeover by another agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeoverMode {
    /// No other agent runs.
    Alone,
    /// Take the ports over from the running agent, if there is one.
    TakeOver {
        /// After the next agent has taken over, wait for SIGTERM instead of ending.
        linger: bool,
    },
}

/// The kinds of frames that the kernel answers in place of the stack.
const ANSWERS: u64 = ANSWER_LINK | ANSWER_TCP;

const _: () = assert!(answer::WINDOW as usize == RECEIVE_BUFFER, "kernel and stack answer SYNs alike");

/// Serves until a signal ends the agent or another agent takes over. On SIGHUP the configuration is read again from
/// `origin`. `entry` controls takeovers from and by other agents.
///
/// # Errors
/// If the configuration is refused on this node, a privilege or kernel feature is missing, or the hub's devices or the
/// metrics address cannot be used. In this case nothing remains on the node.
pub fn serve(config: Config, origin: ConfigSource, entry: TakeoverMode) -> anyhow::Result<()> {
    let refusals = preflight::refusals(&config);
    if !refusals.is_empty() {
        return Err(preflight::ConfigRefusals(refusals).into());
    }
    // The sandbox forbids to start processes.
    let identity = config.identity.as_ref();
    let identity = identity.map(|identity| identity::start(identity, config.sandbox)).transpose()?;
    // Threads inherit the sandbox, so it must be entered before a second thread starts.
    SandboxMode::from(config.sandbox).enter(SandboxStage::Start)?;
    let lingering =
        (entry == TakeoverMode::TakeOver { linger: true }).then(LingerResources::new).transpose()?;
    let metrics = config.metrics;
    let takeover = entry != TakeoverMode::Alone;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        // Signals are caught before there is anything to clean up. The control loop handles those that arrive
        // meanwhile.
        let signals = (Stop::new()?, signal(SignalKind::hangup())?);
        let taking = if takeover { Takeover::begin(&config.run).await? } else { None };
        if takeover && taking.is_none() {
            info!("no agent runs with {}: nothing to take over", config.run.display());
        }
        let (mut state, errands) = NodeState::open(&config)?;
        if taking.is_none() {
            state.take_charge();
        }
        if let Some(identity) = &identity {
            state.set_issuer(identity.issuer().clone());
        }
        let sources = config.sources();
        for source in &sources {
            if let Some(upstream) = source.upstream() {
                state.set_upstream(source.kind(), upstream);
            }
        }
        let (node, handover) = start(&config, state, taking.as_ref())?;
        SandboxMode::from(config.sandbox).enter(SandboxStage::Serve)?;
        let started = StartState { sources, node, handover, errands, taking, identity };
        ControlLoop::start(config, origin, started, signals).await?.run().await
    })?;
    // Feeds and file writers end with the runtime.
    runtime.shutdown_timeout(LAST_WRITES);
    match lingering {
        Some(lingering) if ended == EndReason::TakenOver => lingering.until_stopped(metrics),
        _ => Ok(()),
    }
}

/// What the kernel answers in place of user space.
fn answers(config: &Config) -> u64 {
    match (config.answer_in_kernel, config.answer_requests_in_kernel) {
        (false, _) => 0,
        (true, false) => ANSWERS,
        (true, true) => ANSWERS | ANSWER_REQUESTS,
    }
}

/// Creates hubs, sockets and workers. Guests are served as soon as their port is attached.
fn start(
    config: &Config,
    state: NodeState,
    taking: Option<&Takeover>,
) -> anyhow::Result<(Node, HandoverState)> {
    make_run(&config.run, config.api().group.as_deref())?;
    make_run(&config.run.join(libvirt::DIRECTORY), None)?;
    let request_key = SipKey(rand::random());
    let mut steering = Steering::start(&SteerConfig {
        hub: config.hub.clone(),
        served: config.addresses.clone(),
        arp_only: config.next_hops(),
        limits: config.limits,
        answers: answers(config),
        key: CookieKey(rand::random()),
        request_key,
        pins: config.pins.clone(),
        adopt: taking.map_or(PreviousAgent::Alone, |taking| PreviousAgent::TakeOver { side: taking.side() }),
        mode: config.steer,
        hubs: config.workers,
        queues: hub_queues(),
    })?;
    steering.reports_mut().forward_logs();
    if config.expects_namespaces() {
        steering.prepare_for_namespaces()?;
    }

    let key = steering.maps().key();
    let content = Arc::new(OnDemand::new(Store::new(MAX_SLOTS)));
    // Guests of the previous agent may ask before their records arrive.
    for bound in steering.identities() {
        content.store().expect(bound.slot)?;
    }
    let (handing, questions) = HandoverAnswers::new(Arc::clone(&content));
    let hubs = steering.hubs().all().to_vec();
    // The last tape is that of the kernel's answers.
    let mut collector = Collector::open(&config.audit, hubs.len() + 1)?;
    collector.read_events(state.journal().clone());
    let mut tallies = Vec::new();
    let mut workers = Vec::new();
    let documents = steering.take_documents();
    let reports = documents.is_some().then(|| Arc::new(RequestReports::new(request_key)));
    for (at, hub) in hubs.iter().enumerate() {
        let serve = MetadataService::reporting(Arc::clone(&handing), collector.tape(at), reports.clone());
        tallies.push(serve.tally());
        workers.push(spawn_worker(config, &mut steering, serve, key, hub)?);
    }
    let learned = state.learned_file();
    let room = MemoryBudget::new(config.record_bytes());
    info!(bytes = room.usage().limit, "memory for records");
    let catalogue = RecordCatalogue::new(state, room, &config.ports);
    let documents = match documents.zip(reports) {
        None => None,
        Some((table, reports)) => {
            let counts = Arc::new(WorkerCounts::default());
            tallies.push(Arc::clone(&counts));
            let connections = steering.maps().all_sent()?;
            let (content, tape) = (Arc::clone(&content), collector.tape(hubs.len()));
            let without_agent = Duration::from_secs(config.answer_without_agent_seconds.into());
            let sources = DocumentSources { content, connections, counts, tape, without_agent };
            Some(DocumentPublisher::start(table, sources, reports, learned).context("starting a thread")?)
        }
    };
    let (answers, guard) =
        (AnswerPublisher::new(content, collector, documents), TapGuard::new(config.guard, &config.hub));
    let ports = NodePorts::new(steering, answers, Workers::new(workers), guard, catalogue.plan());
    let node = Node::new(catalogue, ports, Reporter::new(tallies));
    Ok((node, HandoverState { handing, questions }))
}

/// Bytes of memory that an agent locks for the frames of all its sockets.
pub(crate) fn locked_memory(workers: u32) -> u64 {
    Queues::memory(hub_queues(), &SocketConfig::default()).saturating_mul(workers.into())
}

/// Says what failed with an error of the sockets of a hub. A limit on locked memory must allow that of all sockets.
fn binding(hub: &str, workers: u32, error: &AfxdpError) -> String {
    let memory = match error {
        AfxdpError::Memory { .. } => {
            format!(" (the agent locks {} MiB for frames)", locked_memory(workers).div_ceil(1 << 20))
        }
        _ => String::new(),
    };
    format!("binding the AF_XDP sockets to {hub}{memory}")
}

/// Creates the sockets and the worker of a hub.
fn spawn_worker(
    config: &Config,
    steering: &mut Steering,
    serve: MetadataService<HandoverAnswers>,
    key: CookieKey,
    hub: &Hub,
) -> anyhow::Result<WorkerHandle<StackStats>> {
    let sockets = Queues::bind(hub.inner_ifindex, hub.queues, &SocketConfig::default()).map_err(|error| {
        let what = binding(&hub.inner_name, config.workers, &error);
        anyhow::Error::from(error).context(what)
    })?;
    for (queue, socket) in sockets.descriptors() {
        steering.maps_mut().register_socket(hub.number, queue, socket)?;
    }
    let tap = HubTap::new(steering.hubs_mut().take_tap(hub.number))
        .and_long(steering.hubs_mut().take_long_tap(hub.number));
    let stack = Stack::with_ledger(
        StackConfig {
            served: config.addresses.clone(),
            arp_only: config.next_hops(),
            cookie_key: key,
            guest_devices: steering.maps().guest_devices(),
            ..StackConfig::default()
        },
        serve,
        steering.maps().all_sent()?,
    );
    let worker = WorkerConfig {
        name: format!("imds-hub-{}", hub.number),
        spin: Duration::from_micros(config.spin_us.into()),
        sandbox: config.sandbox.into(),
    };
    Ok(match steering.hubs_mut().take_ring(hub.number) {
        Some(ring) => {
            let both = AlternatingSources::new(sockets, ring)
                .context("waiting for two sources of frames at once")?;
            WorkerLauncher::spawn(worker, both, tap, stack)?
        }
        None => WorkerLauncher::spawn(worker, sockets, tap, stack)?,
    })
}

#[cfg(test)]
mod tests {
    use metadata_datapath::afxdp::AfxdpError;
    use rustix::io::Errno;

    use super::{binding, locked_memory};

    #[test]
    fn an_agent_that_may_not_lock_memory_says_how_much_it_locks_in_all() {
        let all = format!("{} MiB", locked_memory(2) >> 20);
        assert_eq!(locked_memory(2), 2 * locked_memory(1));
        for (error, is_said) in
            [(AfxdpError::Memory { source: Errno::NOBUFS }, true), (AfxdpError::Open(Errno::PERM), false)]
        {
            let said = binding("imds-in", 2, &error);
            assert!(said.starts_with("binding the AF_XDP sockets to imds-in"), "{said}");
            assert_eq!(said.contains(&all), is_said, "{said}");
        }
    }
}
