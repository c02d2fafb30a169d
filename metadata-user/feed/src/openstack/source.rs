//! OpenStack as a source of the agent: how it is run, what status says of it, and what it needs on the node.

use metadata_content::record::RecordLimits;
use metadata_content::source::RecordSource;
use metadata_content::upstream::{Upstream, UpstreamOrder};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tracing::subscriber::{NoSubscriber, with_default};

use super::health::{LISTED_BY, OpenstackHealth, OpenstackPeer};
use super::nova::{NovaClient, NovaSecret};
use super::ovsdb::{MonitorUpdate, MonitoredTables, OvsdbError, OvsdbRemote, OvsdbSession};
use super::ports::{self, LocalPort, NodeInstance, NodeInstances, PortBinding};
use super::presence::{self, NeutronPresence};
use super::tls::TlsClient;
use super::{InstanceOrigin, OpenstackOptions, TlsFiles, domains};
use crate::check::Check;
use crate::publisher::{Closed, Publisher};
use crate::record_part::open_mode;
use crate::source::{Source, SourceContext, SourceHealth, SourceTask};
use crate::{FeedError, FeedEvent};

/// The pauses between attempts to reach a database.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(8));
/// What cloud-init asks first: the list of versions, and then the newest that it knows (`OS_VERSIONS` of cloud-init,
/// `sources/helpers/openstack.py`). Each Nova since Rocky has that. EC2's tree follows when a guest asks.
const AHEAD: &[&str] = &[
    "/openstack",
    "/openstack/2018-08-27/meta_data.json",
    "/openstack/2018-08-27/network_data.json",
    "/openstack/2018-08-27/user_data",
    "/openstack/2018-08-27/vendor_data.json",
    "/openstack/2018-08-27/vendor_data2.json",
];
const LOCAL: &str = "Open_vSwitch";
const SOUTHBOUND: &str = "OVN_Southbound";
/// The name of the monitor of whether a server is in contact with its cluster.
const CLUSTER: &str = "cluster";
/// The name of the monitor of what Neutron reads of this agent.
const PRESENCE: &str = "presence";
/// The columns of a binding that may name a chassis: where a port is, where it is while it migrates, and where it shall
/// be. Older schemas lack some.
const CHASSIS_COLUMNS: [&str; 4] =
    ["chassis", "additional_chassis", "requested_chassis", "requested_additional_chassis"];

/// The instances of an OpenStack compute node.
pub struct OpenstackSource {
    options: OpenstackOptions,
    health: Arc<OpenstackHealth>,
    upstream: Upstream,
    orders: Mutex<Option<UnboundedReceiver<UpstreamOrder>>>,
}

impl OpenstackSource {
    /// The source with its section of the configuration.
    #[must_use]
    pub fn new(options: OpenstackOptions) -> Self {
        // The upstream limits the number of orders.
        let (sender, orders) = unbounded_channel();
        let upstream = Upstream::new(AHEAD, move |order| sender.send(order).is_ok());
        let orders = Mutex::new(Some(orders));
        Self { options, health: Arc::new(OpenstackHealth::new()), upstream, orders }
    }
}

impl Source for OpenstackSource {
    fn kind(&self) -> RecordSource {
        RecordSource::Openstack
    }

    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask {
        let (options, health) = (self.options.clone(), Arc::clone(&self.health));
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner).take();
        Box::pin(async move {
            let nova = Arc::new(NovaClient::new(options.nova.clone(), Arc::clone(&health))?);
            let views = watch::channel(None);
            let node = match options.instances {
                InstanceOrigin::Ovn => Some(NodeFollower::new(&options, Arc::clone(&health))?),
                InstanceOrigin::Libvirt => None,
            };
            let feed =
                InstanceFeed { limits: context.limits, publisher: publisher.clone(), known: BTreeMap::new() };
            tokio::select! {
                () = publisher.closed() => {}
                () = async {
                    match &node {
                        Some(node) => node.follow(&views.0).await,
                        None => domains::follow(options.clone().into(), &health, &views.0).await,
                    }
                } => {}
                // It ends with the receiver of its events.
                _ = feed.run(views.1) => {}
                () = async {
                    match orders {
                        Some(orders) => nova.serve(orders, context.wakes).await,
                        None => std::future::pending().await,
                    }
                } => {}
            }
            Ok(())
        })
    }

    fn upstream(&self) -> Option<Upstream> {
        Some(self.upstream.clone())
    }

    fn try_read(&self) -> Result<(), FeedError> {
        if self.options.instances == InstanceOrigin::Libvirt {
            return domains::try_read(&self.options);
        }
        let probed = NodeProbe::of(&OpenstackOptions { listed: false, ..self.options.clone() })?;
        let away = probed.ovsdb.err().or_else(|| {
            // One server of a cluster is enough. While ovn-controller is stopped there is no chassis, and no binding.
            let is_there = probed.southbound.iter().any(|(_, found)| found == &Ok(true));
            let mut away = probed.southbound.into_iter().map(|(server, found)| match found {
                Ok(_) => format!("{server} does not know this chassis"),
                Err(reason) => reason,
            });
            away.next().filter(|_| !is_there)
        });
        away.map_or(Ok(()), |reason| Err(FeedError::Vm { reason }))
    }

    fn health(&self) -> Option<SourceHealth> {
        Some(self.health.report(&self.options, self.upstream.refused(), Instant::now()))
    }

    fn preflight(&self) -> Vec<Check> {
        let mut checks = match self.options.instances {
            InstanceOrigin::Ovn => match NodeProbe::of(&self.options) {
                Ok(probed) => probed.checks(&self.options),
                Err(error) => vec![Check::fail(
                    "openstack.configuration",
                    error.to_string(),
                    "settings of `openstack` by which the agent starts",
                    "Correct them; `xdp-imds openstack import` prints those of Neutron's files",
                )],
            },
            InstanceOrigin::Libvirt => vec![domains::check(&self.options)],
        };
        checks.extend(match NovaSecret::read(&self.options.nova.secret) {
            Ok(_) => nova_checks(&self.options, probe(async { ask_nova(&self.options).await })),
            Err(error) => vec![Check::fail(
                "openstack.secret",
                error.found(),
                "the secret that Nova checks signatures by",
                "Copy `metadata_proxy_shared_secret` of [neutron] in nova.conf to this file, with mode 0600; \
                 `xdp-imds openstack import` does so from Neutron's files",
            )],
        });
        checks
    }
}

/// Runs a probe on a thread of its own: whoever asks may be in a runtime.
fn probe<T: Send>(work: impl Future<Output = Result<T, String>> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| error.to_string())?;
            // What fails is the probe's result: a log line would say it twice.
            with_default(NoSubscriber::default(), || runtime.block_on(work))
        });
        thread.join().unwrap_or_else(|_| Err("the probe has failed".into()))
    })
}

const NOT_NOVA: &str =
    "See that `openstack.nova.url` is Nova's metadata API, with `service_metadata_proxy = true` of [neutron]";

/// What a server answers to requests for an instance that does not exist.
struct NovaProbe {
    status: u16,
    /// With a wrong signature.
    forged: u16,
}

async fn ask_nova(options: &OpenstackOptions) -> Result<NovaProbe, String> {
    let health = Arc::new(OpenstackHealth::new());
    let client = NovaClient::new(options.nova.clone(), health).map_err(|error| error.to_string())?;
    let status = client.probe().await.map_err(|error| error.reason)?.0;
    let forged = client.probe_with_wrong_signature().await.map_err(|error| error.reason)?.0;
    Ok(NovaProbe { status, forged })
}

/// Judges what Nova answers, and the file of the secret.
fn nova_checks(options: &OpenstackOptions, nova: Result<NovaProbe, String>) -> Vec<Check> {
    let mut checks = vec![match nova {
        // Nova knows the signature, and no such instance.
        Ok(NovaProbe { status: 404 | 200, forged: 403 }) => {
            Check::ok("openstack.nova", format!("{} accepts our signature", options.nova.url))
        }
        Ok(NovaProbe { status: 404 | 200, forged }) => Check::fail(
            "openstack.nova",
            format!("{} answers {forged} to a wrong signature", options.nova.url),
            "403, as of Nova's metadata API",
            NOT_NOVA,
        ),
        Ok(NovaProbe { status: 403, .. }) => Check::fail(
            "openstack.nova",
            "it refuses our signature (403)",
            "the secret of `metadata_proxy_shared_secret` of [neutron] in nova.conf",
            format!("Copy it to {}", options.nova.secret.display()),
        ),
        Ok(NovaProbe { status, .. }) => Check::fail(
            "openstack.nova",
            format!("the status {status}"),
            "404 for an instance that does not exist",
            NOT_NOVA,
        ),
        Err(reason) => Check::fail(
            "openstack.nova",
            reason,
            "an answer of Nova's metadata API",
            "Set `openstack.nova.url`, and see that nova-api-metadata runs and is reachable from here",
        ),
    }];
    checks.extend(open_mode(&options.nova.secret).map(|mode| {
        Check::warn(
            "openstack.secret",
            format!("{}: mode {mode:04o}", options.nova.secret.display()),
            "a file that only the agent's user reads: whoever has the secret can ask as any instance of the cloud",
            format!("`chmod 600 {}`", options.nova.secret.display()),
        )
    }));
    checks
}

/// What the databases say when they are asked once.
struct NodeProbe {
    ovsdb: Result<LocalView, String>,
    /// Each server of the southbound database, with whether it knows the chassis. Empty if the local OVSDB names none.
    southbound: Vec<(String, Result<bool, String>)>,
    /// What the first server that knows the chassis says to a write that is taken back, unless none is wanted.
    listed: Option<Result<(), String>>,
}

impl NodeProbe {
    fn of(options: &OpenstackOptions) -> Result<Self, FeedError> {
        let node = NodeFollower::new(options, Arc::new(OpenstackHealth::new()))?;
        let ovsdb = probe(async {
            let mut tables = MonitoredTables::default();
            node.open_local(&mut tables).await.map_err(|error| error.to_string())?;
            node.local_view(&tables)
        });
        let servers =
            ovsdb.iter().flat_map(|view| view.target.remotes.iter().map(move |remote| (view, remote)));
        let mut listed = None;
        let southbound = servers.enumerate().map(|(number, (view, remote))| {
            let found = probe(async {
                let opened = node.open_southbound(&view.target, number).await;
                let mut opened = opened.map_err(|error| error.to_string())?;
                let is_known = !opened.chassis.uuids("Chassis").is_empty();
                if is_known && options.listed && listed.is_none() {
                    listed = Some(opened.try_to_register().await);
                }
                Ok(is_known)
            });
            (remote.to_string(), found)
        });
        let southbound = southbound.collect();
        Ok(Self { ovsdb, southbound, listed })
    }

    fn checks(self, options: &OpenstackOptions) -> Vec<Check> {
        let mut checks = Vec::new();
        let chassis = match &self.ovsdb {
            Ok(view) => {
                let found = format!(
                    "{}: chassis {}, {} ports of instances",
                    options.ovsdb,
                    view.target.chassis,
                    view.ports.len()
                );
                checks.push(Check::ok("openstack.ovsdb", found));
                view.target.chassis.clone()
            }
            Err(reason) => {
                checks.push(Check::fail(
                    "openstack.ovsdb",
                    reason,
                    "the local OVSDB, with `external_ids:system-id` and `external_ids:ovn-remote`",
                    "See `systemctl status openvswitch-switch` and `ovs-vsctl get Open_vSwitch . external_ids`, or set \
                     `openstack.ovsdb`, `openstack.southbound` and `openstack.chassis`",
                ));
                String::new()
            }
        };
        // The agent uses one server of a cluster, and another one when that is away.
        let is_there = self.southbound.iter().any(|(_, found)| found == &Ok(true));
        checks.extend(self.southbound.into_iter().map(|(server, found)| match found {
            Ok(true) => Check::ok("openstack.southbound", format!("{server}: it has the chassis {chassis}")),
            Ok(false) => Check::fail(
                "openstack.southbound",
                format!("{server}: no chassis {chassis}"),
                "this node's chassis in OVN's southbound database",
                "See that ovn-controller runs, or set `openstack.chassis` to its name in `ovn-sbctl list Chassis`",
            ),
            Err(reason) if is_there => Check::warn(
                "openstack.southbound",
                reason,
                "an answer of each server; the agent uses another one",
                format!("See that {server} is up, or take it from `openstack.southbound` or `ovn-remote`"),
            ),
            Err(reason) => Check::fail(
                "openstack.southbound",
                reason,
                "OVN's southbound database, as ovn-controller uses it",
                "Set `openstack.southbound`, and for `ssl:` the files of `openstack.tls`",
            ),
        }));
        checks.extend(self.listed.map(|listed| match listed {
            Ok(()) => Check::ok("openstack.listed", "`openstack network agent list` can show this agent"),
            Err(reason) => Check::warn(
                "openstack.listed",
                reason,
                "a southbound database in which this node may write `external_ids` of its Chassis_Private",
                format!("Guests are served without it. For `openstack network agent list` {LISTED_BY}"),
            ),
        }));
        checks
    }
}

/// What the local OVSDB says.
#[derive(Clone, Debug, PartialEq)]
struct LocalView {
    target: SouthboundTarget,
    ports: Vec<LocalPort>,
}

/// Where the bindings of this node are.
#[derive(Clone, Debug, PartialEq)]
struct SouthboundTarget {
    remotes: Vec<OvsdbRemote>,
    chassis: String,
    /// The integration bridge.
    bridge: String,
}

/// Follows the databases, and connects again whenever a connection ends.
struct NodeFollower<'a> {
    options: &'a OpenstackOptions,
    ovsdb: Vec<OvsdbRemote>,
    tls: Option<TlsClient>,
    health: Arc<OpenstackHealth>,
}

impl<'a> NodeFollower<'a> {
    fn new(options: &'a OpenstackOptions, health: Arc<OpenstackHealth>) -> Result<Self, FeedError> {
        let wrong = |reason: String| FeedError::Vm { reason };
        let ovsdb = OvsdbRemote::list(&options.ovsdb)
            .map_err(|reason| wrong(format!("openstack.ovsdb: {reason}")))?;
        if let Some(text) = &options.southbound {
            OvsdbRemote::list(text).map_err(|reason| wrong(format!("openstack.southbound: {reason}")))?;
        }
        let has_tls = options.tls != TlsFiles::default();
        let tls = has_tls.then(|| TlsClient::new(&options.tls)).transpose();
        let tls = tls.map_err(|error| wrong(format!("openstack.tls: {error}")))?;
        Ok(Self { options, ovsdb, tls, health })
    }

    /// Follows the databases, and joins what they say.
    async fn follow(&self, views: &watch::Sender<Option<NodeInstances>>) {
        let (local, bound) = (watch::channel(None), watch::channel(None));
        tokio::select! {
            () = self.follow_ports(&local.0) => {}
            () = self.follow_bindings(local.1.clone(), &bound.0) => {}
            () = self.join(local.1.clone(), bound.1, views) => {}
        }
    }

    async fn join(
        &self,
        mut local: watch::Receiver<Option<LocalView>>,
        mut bound: watch::Receiver<Option<BTreeMap<String, PortBinding>>>,
        views: &watch::Sender<Option<NodeInstances>>,
    ) {
        let mut last = BTreeMap::new();
        loop {
            let view = local.borrow_and_update().clone();
            let bindings = bound.borrow_and_update().clone();
            if let Some(view) = view {
                // Until the bindings are there, all instances are expected.
                let is_whole = bindings.is_some();
                ports::keep_last(&mut last, bindings.unwrap_or_default(), &view.ports);
                let instances = ports::instances(&view.ports, &last, self.options);
                views.send_replace(Some(NodeInstances { instances, is_whole }));
            }
            tokio::select! {
                Ok(()) = local.changed() => {}
                Ok(()) = bound.changed() => {}
            }
        }
    }

    /// Follows the node's ports.
    async fn follow_ports(&self, views: &watch::Sender<Option<LocalView>>) {
        let (mut tables, mut pauses) = (MonitoredTables::default(), Pauses::default());
        loop {
            let Err(error) = self.ports_session(&mut tables, views, &mut pauses).await;
            self.health.on_failure(OpenstackPeer::Ovsdb, error.to_string());
            pauses.rest().await;
        }
    }

    async fn ports_session(
        &self,
        tables: &mut MonitoredTables,
        views: &watch::Sender<Option<LocalView>>,
        pauses: &mut Pauses,
    ) -> Result<std::convert::Infallible, OvsdbError> {
        let mut session = self.open_local(tables).await?;
        pauses.reset();
        loop {
            match self.local_view(tables) {
                Ok(view) => {
                    self.health.on_answer(OpenstackPeer::Ovsdb);
                    views.send_if_modified(|known| {
                        let is_new = known.as_ref() != Some(&view);
                        *known = Some(view);
                        is_new
                    });
                }
                Err(reason) => self.health.on_failure(OpenstackPeer::Ovsdb, reason),
            }
            if let Some(update) = session.update(None).await? {
                tables.apply(update)?;
            }
        }
    }

    /// Begins to follow the local OVSDB.
    async fn open_local(&self, tables: &mut MonitoredTables) -> Result<OvsdbSession, OvsdbError> {
        let mut session = self.connect(&self.ovsdb, 0).await?;
        let plugged = json!(["external_ids", "includes", ["map", [["iface-status", "active"]]]]);
        let wanted = json!({
            "Open_vSwitch": [{"columns": ["external_ids"]}],
            "Interface": [{"columns": ["name", "type", "external_ids"], "where": [plugged]}],
        });
        let start = session.monitor(LOCAL, "ports", &wanted, tables.since()).await?;
        tables.begin(start)?;
        Ok(session)
    }

    fn local_view(&self, tables: &MonitoredTables) -> Result<LocalView, String> {
        let node = tables.rows(LOCAL).next();
        let of_node = |key: &str| node.and_then(|row| row.external_id(key)).map(str::to_owned);
        let lacks = |key: &str| {
            format!("{}: expected `external_ids:{key}` of Open_vSwitch, found none", self.options.ovsdb)
        };
        let chassis = self
            .options
            .chassis
            .clone()
            .or_else(|| of_node("system-id"))
            .ok_or_else(|| lacks("system-id"))?;
        let remotes = self.options.southbound.clone().or_else(|| of_node("ovn-remote"));
        let remotes = OvsdbRemote::list(&remotes.ok_or_else(|| lacks("ovn-remote"))?)?;
        let bridge = of_node("ovn-bridge").unwrap_or_else(|| "br-int".into());
        let target = SouthboundTarget { remotes, chassis, bridge };
        Ok(LocalView { target, ports: ports::local_ports(tables) })
    }

    /// Follows the bindings of this node's chassis.
    async fn follow_bindings(
        &self,
        mut local: watch::Receiver<Option<LocalView>>,
        bound: &watch::Sender<Option<BTreeMap<String, PortBinding>>>,
    ) {
        let (mut pauses, mut attempt) = (Pauses::default(), 0);
        loop {
            let target = local.borrow_and_update().as_ref().map(|view| view.target.clone());
            let is_other = async {
                while local.changed().await.is_ok() {
                    if local.borrow_and_update().as_ref().map(|view| &view.target) != target.as_ref() {
                        return;
                    }
                }
                std::future::pending().await
            };
            let session = async {
                let Some(target) = &target else { return std::future::pending().await };
                self.bindings_session(target, attempt, bound, &mut pauses).await
            };
            tokio::select! {
                () = is_other => {}
                Err(error) = session => {
                    self.health.on_failure(OpenstackPeer::Southbound, error.to_string());
                    pauses.rest().await;
                    // Another server of a cluster may be there.
                    attempt += 1;
                }
            }
        }
    }

    async fn bindings_session(
        &self,
        target: &SouthboundTarget,
        attempt: usize,
        bound: &watch::Sender<Option<BTreeMap<String, PortBinding>>>,
        pauses: &mut Pauses,
    ) -> Result<std::convert::Infallible, OvsdbError> {
        let mut session = self.open_southbound(target, attempt).await?;
        let columns = session.columns.clone();
        pauses.reset();
        self.health.on_answer(OpenstackPeer::Southbound);
        self.health.set_unlisted(None);
        if self.options.listed {
            session.follow_presence().await?;
        }
        loop {
            let uuids: Vec<String> =
                session.chassis.uuids("Chassis").into_iter().map(str::to_owned).collect();
            self.health.set_unknown_chassis(uuids.is_empty().then_some(&target.chassis));
            let of_chassis = uuids.iter().flat_map(|uuid| {
                columns.iter().map(move |column| json!([column, "includes", ["uuid", uuid]]))
            });
            let of_chassis: Vec<_> = of_chassis.collect();
            // Without a condition it would be all ports of the cloud.
            if !of_chassis.is_empty() {
                let mut tables = MonitoredTables::default();
                let followed: Vec<_> = ["logical_port", "external_ids"].iter().chain(&columns).collect();
                let wanted = json!({"Port_Binding": [{"columns": followed, "where": of_chassis}]});
                tables.begin(session.ovsdb.monitor(SOUTHBOUND, "ports", &wanted, None).await?)?;
                bound.send_replace(Some(ports::bindings(&tables, &uuids)));
                loop {
                    let update = session.update(&self.health).await?;
                    if update.monitor != "ports" {
                        session.chassis.apply(update)?;
                        break;
                    }
                    tables.apply(update)?;
                    bound.send_replace(Some(ports::bindings(&tables, &uuids)));
                }
                session.ovsdb.call("monitor_cancel", json!(["ports"])).await?;
            } else {
                // No chassis is no binding, and every record stays.
                bound.send_if_modified(|known| known.is_none() && known.replace(BTreeMap::new()).is_none());
                let update = session.update(&self.health).await?;
                session.chassis.apply(update)?;
            }
        }
    }

    /// Connects to a server of the southbound database, and begins to follow the chassis.
    async fn open_southbound(
        &self,
        target: &SouthboundTarget,
        attempt: usize,
    ) -> Result<SouthboundSession, OvsdbError> {
        let mut session = self.connect(&target.remotes, attempt).await?;
        let remote = target.remotes[attempt % target.remotes.len()].clone();
        let connected = json!({"Database": [{"columns": ["name"], "where": [["connected", "==", true]]}]});
        let cluster = match session.monitor("_Server", CLUSTER, &connected, None).await {
            Ok(start) => {
                let mut tables = MonitoredTables::default();
                tables.begin(start)?;
                Some(tables)
            }
            // Servers before OVS 2.9 have no such database, and no clusters.
            Err(OvsdbError::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        let schema = session.call("get_schema", json!([SOUTHBOUND])).await?;
        let columns = &schema["tables"]["Port_Binding"]["columns"];
        let columns: Vec<_> =
            CHASSIS_COLUMNS.into_iter().filter(|column| columns[*column] != Value::Null).collect();
        let wanted = json!({"Chassis": [{"columns": ["name"], "where": [["name", "==", target.chassis]]}]});
        let mut chassis = MonitoredTables::default();
        chassis.begin(session.monitor(SOUTHBOUND, "chassis", &wanted, None).await?)?;
        let has_presence = schema["tables"][presence::TABLE] != Value::Null;
        let presence = has_presence.then(|| NeutronPresence::new(&target.chassis, &target.bridge));
        let opened = SouthboundSession { ovsdb: session, remote, cluster, chassis, columns, presence };
        opened.check_cluster()?;
        Ok(opened)
    }

    async fn connect(&self, remotes: &[OvsdbRemote], attempt: usize) -> Result<OvsdbSession, OvsdbError> {
        let remote = &remotes[attempt % remotes.len()];
        OvsdbSession::connect(remote, self.tls.as_ref()).await
    }
}

/// A connection to a server of the southbound database.
struct SouthboundSession {
    ovsdb: OvsdbSession,
    remote: OvsdbRemote,
    /// The databases of the server that are in contact with the majority of their cluster, or have none (`connected` in
    /// ovsdb-server(5)).
    cluster: Option<MonitoredTables>,
    chassis: MonitoredTables,
    /// The columns of bindings that name a chassis.
    columns: Vec<&'static str>,
    /// What Neutron reads of this agent; `None` on databases that are too old for it.
    presence: Option<NeutronPresence>,
}

impl SouthboundSession {
    /// Waits for the next change of the southbound database, and meanwhile shows Neutron that the agent is there.
    async fn update(&mut self, health: &OpenstackHealth) -> Result<MonitorUpdate, OvsdbError> {
        loop {
            let due = self.presence.as_ref().and_then(NeutronPresence::due);
            let Some(update) = self.ovsdb.update(due).await? else {
                health.set_unlisted(self.register(&[]).await?);
                continue;
            };
            match (&*update.monitor, &mut self.cluster, &mut self.presence) {
                (CLUSTER, Some(cluster), _) => {
                    cluster.apply(update)?;
                    self.check_cluster()?;
                }
                (PRESENCE, _, Some(presence)) => presence.apply(update)?,
                _ => return Ok(update),
            }
        }
    }

    /// Begins to follow what Neutron reads of this agent.
    async fn follow_presence(&mut self) -> Result<(), OvsdbError> {
        let Some(presence) = &mut self.presence else { return Ok(()) };
        let start = self.ovsdb.monitor(SOUTHBOUND, PRESENCE, &presence.wanted(), None).await?;
        presence.begin(start)
    }

    /// Writes what Neutron reads of this agent, followed by other operations. Returns why it cannot be written, which is
    /// no fault of the connection.
    async fn register(&mut self, then: &[Value]) -> Result<Option<String>, OvsdbError> {
        let Some(presence) = &mut self.presence else {
            return Ok(Some(format!(
                "the southbound database has no {}, as before OVN 20.09",
                presence::TABLE
            )));
        };
        let transaction = [json!(SOUTHBOUND)].into_iter().chain(presence.transaction());
        let transaction: Vec<_> = transaction.chain(then.iter().cloned()).collect();
        match self.ovsdb.call("transact", transaction.into()).await {
            Ok(results) => {
                let details = &results[0]["details"];
                Ok(results[0]["error"]
                    .as_str()
                    .map(|error| format!("{error}: {}", details.as_str().unwrap_or_default())))
            }
            Err(error @ (OvsdbError::Late { .. } | OvsdbError::Refused { .. })) => {
                Ok(Some(error.to_string()))
            }
            Err(error) => Err(error),
        }
    }

    /// Asks whether the row may be written, and writes nothing.
    async fn try_to_register(&mut self) -> Result<(), String> {
        let refusal = self.register(&[json!({"op": "abort"})]).await.map_err(|error| error.to_string())?;
        refusal.map_or(Ok(()), Err)
    }

    fn check_cluster(&self) -> Result<(), OvsdbError> {
        let is_connected =
            |tables: &MonitoredTables| tables.rows("Database").any(|row| row.text("name") == SOUTHBOUND);
        if self.cluster.as_ref().is_none_or(is_connected) {
            Ok(())
        } else {
            Err(OvsdbError::NoQuorum(self.remote.clone()))
        }
    }
}

/// The pauses between attempts, each twice the one before.
#[derive(Default)]
struct Pauses(u32);

impl Pauses {
    async fn rest(&mut self) {
        let pause = (PAUSES.0 * 2_u32.pow(self.0)).min(PAUSES.1);
        self.0 = (self.0 + 1).min(8);
        tokio::time::sleep(pause).await;
    }

    fn reset(&mut self) {
        self.0 = 0;
    }
}

/// Publishes the instances of the node.
struct InstanceFeed {
    limits: RecordLimits,
    publisher: Publisher,
    known: BTreeMap<String, KnownInstance>,
}

struct KnownInstance {
    instance: NodeInstance,
    generation: u64,
    /// There was no memory for its record.
    lacks_memory: bool,
}

impl InstanceFeed {
    async fn run(mut self, mut views: watch::Receiver<Option<NodeInstances>>) -> Result<(), Closed> {
        let mut freed = self.publisher.freed();
        let mut is_synced = false;
        loop {
            let view = views.borrow_and_update().clone();
            if let Some(NodeInstances { instances, is_whole }) = view {
                self.publish(instances).await?;
                if is_whole && !std::mem::replace(&mut is_synced, true) {
                    self.publisher.publish(FeedEvent::Synced).await?;
                }
            }
            tokio::select! {
                Ok(()) = views.changed() => {}
                () = freed.wait() => self.known.retain(|_, known| !known.lacks_memory),
            }
        }
    }

    async fn publish(&mut self, wanted: BTreeMap<String, NodeInstance>) -> Result<(), Closed> {
        let gone: Vec<_> = self.known.keys().filter(|key| !wanted.contains_key(*key)).cloned().collect();
        for key in gone {
            self.known.remove(&key);
            self.publisher.publish(FeedEvent::Remove { key }).await?;
        }
        for (key, instance) in wanted {
            let known = self.known.get(&key);
            if known.is_some_and(|known| known.instance == instance) {
                continue;
            }
            let was_expected = known.is_some_and(|known| matches!(known.instance, NodeInstance::Expected(_)));
            // Seconds do not go back after a restart, as a count of changes would.
            let former = known.map_or(0, |known| known.generation);
            let generation = unix_now().max(former + 1);
            let (event, lacks_memory) = self.event(&key, &instance, generation);
            if !matches!(event, FeedEvent::Upsert { .. }) {
                self.confine(&key, &instance).await?;
            }
            if was_expected && matches!(event, FeedEvent::Rejected { .. }) {
                // Requests of a refused instance wait no longer; a rejection leaves its expectation as it is.
                let is_refused = matches!(instance, NodeInstance::Refused { .. });
                let identities = instance.identities().filter(|_| !is_refused).unwrap_or_default();
                self.publisher.publish(FeedEvent::Expect { key: key.clone(), identities }).await?;
            }
            self.known.insert(key, KnownInstance { instance, generation, lacks_memory });
            self.publisher.publish(event).await?;
        }
        Ok(())
    }

    /// Has the last record of an instance removed if it has a NIC that the instance has lost: the port may be another
    /// instance's by now.
    async fn confine(&self, key: &str, instance: &NodeInstance) -> Result<(), Closed> {
        let Some(identities) = instance.identities() else { return Ok(()) };
        self.publisher.publish(FeedEvent::RemoveUnless { key: key.to_owned(), identities }).await
    }

    /// The event of an instance, and whether there is no memory for its record.
    fn event(&self, key: &str, instance: &NodeInstance, generation: u64) -> (FeedEvent, bool) {
        let rejected = |error| FeedEvent::Rejected { key: key.to_owned(), error };
        match instance {
            NodeInstance::Expected(identities) => {
                (FeedEvent::Expect { key: key.to_owned(), identities: identities.clone() }, false)
            }
            NodeInstance::Refused { reason, .. } => {
                (rejected(FeedError::Vm { reason: reason.clone() }), false)
            }
            NodeInstance::Bound(described, owner) => {
                let record = ports::record(key, described.clone(), owner.clone(), generation, &self.limits);
                let record = match record {
                    Ok(record) => record,
                    Err(error) => return (rejected(error.into()), false),
                };
                match self.publisher.admit(key, &record) {
                    Ok(()) => (FeedEvent::Upsert { key: key.to_owned(), record: record.into() }, false),
                    Err(exhausted) => (rejected(FeedError::Room(exhausted)), true),
                }
            }
        }
    }
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::InstanceFeed;
    use crate::FeedEvent;
    use crate::openstack::OpenstackOptions;
    use crate::openstack::ports::{LocalPort, NodeInstance, PortBinding, instances};
    use crate::publisher::Publisher;
    use crate::registry::{Change, RecordId, Registry};
    use metadata_common::mac::Mac;
    use metadata_common::port::PortName;
    use metadata_content::record::RecordLimits;
    use metadata_content::source::RecordSource;
    use std::collections::BTreeMap;
    use tokio::sync::mpsc;

    /// Two instances. If both claim a port, it is the first one's.
    const A: &str = "00000000-3b5e-4d1a-9d2c-0f5e8a1b2c3d";
    const B: &str = "77777777-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

    /// A port's number, its instance, and its project if it is bound.
    type Plugged = (u8, &'static str, Option<&'static str>);

    fn view(plugged: &[Plugged]) -> BTreeMap<String, NodeInstance> {
        let port = |&(number, instance, _): &Plugged| LocalPort {
            id: format!("{number:08x}-0f6a-4c1b-9a51-2f9a43b1c0de"),
            ifname: format!("tap{number:08x}-0f"),
            mac: Mac([0xfa, 0x16, 0x3e, 0, 0, number]),
            instance: instance.to_owned(),
        };
        let ports: Vec<_> = plugged.iter().map(port).collect();
        let bindings = plugged.iter().filter_map(|one| {
            let binding = PortBinding {
                instance: one.1.to_owned(),
                project: one.2?.to_owned(),
                addresses: vec!["10.0.0.5/24".to_owned()],
                migration: None,
            };
            Some((port(one).id, binding))
        });
        instances(&ports, &bindings.collect(), &OpenstackOptions::default())
    }

    /// The agent's side of the feed.
    struct Agent {
        feed: InstanceFeed,
        events: mpsc::Receiver<FeedEvent>,
        registry: Registry,
        claims: BTreeMap<RecordId, Vec<(PortName, Mac)>>,
    }

    impl Agent {
        fn feed() -> (InstanceFeed, mpsc::Receiver<FeedEvent>) {
            let (sender, events) = mpsc::channel(64);
            let publisher = Publisher::from(sender);
            (InstanceFeed { limits: RecordLimits::DEFAULT, publisher, known: BTreeMap::new() }, events)
        }

        fn new() -> Self {
            let (feed, events) = Self::feed();
            Self { feed, events, registry: Registry::default(), claims: BTreeMap::new() }
        }

        /// The records of the former run come from the snapshot.
        fn restart(&mut self) {
            (self.feed, self.events) = Self::feed();
            self.registry.begin(RecordSource::Openstack);
        }

        /// Whose requests each port's are.
        async fn holders(&mut self, plugged: &[Plugged]) -> Vec<(u8, &str)> {
            self.feed.publish(view(plugged)).await.expect("the agent is there");
            while let Ok(event) = self.events.try_recv() {
                for change in self.registry.apply(RecordSource::Openstack, event) {
                    match change {
                        Change::Put(id, record) => _ = self.claims.insert(id, record.identities()),
                        Change::Expect(id, identities) => _ = self.claims.insert(id, identities),
                        Change::Drop(id) => _ = self.claims.remove(&id),
                    }
                }
            }
            let mut holders = BTreeMap::new();
            for (id, identities) in &self.claims {
                for (_, mac) in identities {
                    holders.entry(mac.0[5]).or_insert(&*id.key);
                }
            }
            holders.into_iter().collect()
        }
    }

    /// What happens, what is plugged then, and whose requests each port's are.
    type Step<'a> = (&'a str, &'a [Plugged], &'a [(u8, &'a str)]);

    #[tokio::test]
    async fn an_instance_without_a_record_keeps_no_port_that_another_has_by_now() {
        const P1: Option<&str> = Some("p1");
        const P2: Option<&str> = Some("p2");
        let mut agent = Agent::new();
        let steps: [Step<'_>; 8] = [
            ("both are bound", &[(1, A, P1), (2, A, P1)], &[(1, A), (2, A)]),
            ("a port of another project", &[(1, A, P1), (2, A, P1), (3, A, P2)], &[(1, A), (2, A)]),
            ("the first moves", &[(1, B, P1), (2, A, P1), (3, A, P2)], &[(1, B)]),
            ("the other project's goes", &[(1, B, P1), (2, A, P1), (4, A, P1)], &[(1, B), (2, A), (4, A)]),
            ("the rest is not bound", &[(1, B, P1), (2, B, P1), (4, A, None)], &[(1, B), (2, B), (4, A)]),
            ("expected with less", &[(1, B, P1), (4, B, P1), (5, A, None)], &[(1, B), (4, B), (5, A)]),
            ("refused after that", &[(5, B, P1), (6, A, P1), (7, A, P2)], &[(5, B)]),
            ("good again", &[(5, B, P1), (6, A, P1), (7, A, P1)], &[(5, B), (6, A), (7, A)]),
        ];
        for (what, plugged, expected) in steps {
            assert_eq!(agent.holders(plugged).await, expected, "{what}");
        }
        agent.restart();
        let steps: [Step<'_>; 3] = [
            ("as before", &[(5, B, None), (6, A, P1), (7, A, P2)], &[(5, B), (6, A), (7, A)]),
            ("one has moved meanwhile", &[(5, B, P1), (6, B, P1), (7, A, None)], &[(5, B), (6, B), (7, A)]),
            ("unplugged", &[(5, B, P1)], &[(5, B)]),
        ];
        for (what, plugged, expected) in steps {
            assert_eq!(agent.holders(plugged).await, expected, "{what}");
        }
    }
}
