//! `xdp-imds status`: the state of an agent, or of one of its guests.
//!
//! The agent answers `GET /v1/status` on its control socket with a [`AgentStatus`] as JSON, and `?guest=NAME` with a
//! list of [`GuestStatus`]. The verb prints a table, or the JSON unchanged. The types below define the fields. A new
//! version may add fields, but no field changes its meaning within [`SCHEMA`]. Times are in seconds. Of a record, the
//! status shows only identifiers: its name, its VM's name and UUID, its ports and MACs.

mod client;
mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};

use metadata_common::printable::counted;
use metadata_content::record::event::AnnouncedEvent;
use metadata_content::source::RecordSource;
use serde::{Deserialize, Serialize};

pub(crate) use client::refusal;
pub use client::{ClientError, StatusRequest, StatusResponse, StreamedResponse, ask, get, get_within, open};

/// The version of the format. It increases when a field changes its meaning or is removed.
pub const SCHEMA: &str = "status/1";
/// Most ports to list by default; the status counts the others.
pub const LISTED_PORTS: usize = 64;
/// Most conflicts, most refused records, most shadowed records, most shared UUIDs and most events to list, and most records
/// of one shared UUID.
pub const LISTED_COMPLAINTS: usize = 32;
/// Most MACs that a line names as those that a port expects.
const NAMED_MACS: usize = 4;
/// Most guests to list under one name.
pub const LISTED_GUESTS: usize = 64;

/// Which ports to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortFilter {
    /// Ports that are not attached, at most [`LISTED_PORTS`].
    Trouble,
    /// Every port.
    EveryPort,
}

/// The state of the agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// [`SCHEMA`].
    pub schema: String,
    /// The agent's version.
    pub version: String,
    /// The agent's PID.
    pub pid: u32,
    /// The directory of pinned programs and maps; `None` if the agent pins nothing.
    #[serde(default)]
    pub pins: Option<PathBuf>,
    /// The directory of records that the agent reads, an absolute path; `None` if it reads none.
    #[serde(default)]
    pub records: Option<PathBuf>,
    /// Seconds since it started.
    pub uptime: f64,
    /// `/healthz` reports success.
    pub live: bool,
    /// `/readyz` reports success.
    pub ready: bool,
    /// The phase of the agent's life.
    pub phase: Phase,
    /// The side of the node that the agent uses, 0 or 1; it changes with each takeover.
    pub side: u32,
    /// The records come from the snapshot, because their source is unavailable.
    pub from_snapshot: bool,
    /// Inherited ports remain closed because no record names them yet.
    pub has_left: bool,
    /// Faults that need an operator, a line each; empty if the agent is healthy.
    pub troubles: Vec<String>,
    /// The workers, one for each hub.
    pub workers: Vec<WorkerStatus>,
    /// The ports.
    pub ports: PortSummary,
    /// Number of records by source and state.
    pub instances: Vec<Instances>,
    /// Number of good records by `serve.smbios`, the datasource that the guest's firmware names.
    #[serde(default)]
    pub datasources: BTreeMap<String, u64>,
    /// Identities in the kernel's maps: MACs on ports.
    pub identities: u64,
    /// Records that claim another record's identity, or match several ports; at most [`LISTED_COMPLAINTS`].
    pub conflicts: Vec<String>,
    /// Records whose latest version is refused; at most [`LISTED_COMPLAINTS`].
    pub refused: Vec<RefusedRecord>,
    /// Records shadowed by one of a higher source; at most [`LISTED_COMPLAINTS`].
    #[serde(default)]
    pub shadowed: Vec<ShadowedRecord>,
    /// Ports whose guests use a MAC other than the one in their records; at most [`LISTED_COMPLAINTS`]. Also among the
    /// troubles.
    #[serde(default)]
    pub mac_mismatches: Vec<MacMismatch>,
    /// UUIDs that several VMs share; at most [`LISTED_COMPLAINTS`]. No fault: each VM is known by its owner.
    #[serde(default)]
    pub shared_uuids: Vec<SharedUuid>,
    /// The file of `token_key`, if it is missing while its keys stay in use. Also among the troubles.
    #[serde(default)]
    pub missing_token_key: Option<PathBuf>,
    /// How the sources of records can be read; only those that are asked again and again.
    #[serde(default)]
    pub sources: Vec<SourceStatus>,
    /// The issuer of identity tokens; `None` on a node that issues none.
    #[serde(default)]
    pub identity: Option<IssuerState>,
    /// The memory of records, estimated from above.
    #[serde(default)]
    pub record_memory: RecordMemory,
    /// How tenants share the node's limits; see [`Share`].
    #[serde(default)]
    pub shares: Vec<Share>,
    /// The last comparison of what the agent attached and pinned with what the kernel has.
    #[serde(default)]
    pub attachments: AttachmentStatus,
    /// Number of events of VMs that are scheduled or have begun.
    #[serde(default)]
    pub pending_events: u64,
    /// These events; at most [`LISTED_COMPLAINTS`].
    #[serde(default)]
    pub events: Vec<PendingEvent>,
    /// Counters that are 0 on a healthy node. Those of frames are of maps that outlive the agent; the others begin with
    /// the agent or with a device.
    pub counters: BTreeMap<String, u64>,
    /// Recent warnings, the newest last.
    pub lately: Vec<RecentWarning>,
}

/// What the agent only counts among its problems: nouns, and what is wrong with them. The status lists them apart.
const COUNTED: [(&str, &str); 3] = [("port", "in error"), ("record", "refused"), ("record", "in conflict")];

impl AgentStatus {
    /// Adds the number of ports in error, of refused records and of those in conflict to the problems.
    pub fn count_problems(&mut self, counts: [u64; 3]) {
        for (count, (noun, state)) in counts.into_iter().zip(COUNTED) {
            if count > 0 {
                self.troubles.push(format!("{} {state}", counted(count, noun)));
            }
        }
    }

    /// The problems that are not elsewhere in the status, and not only a number of what is.
    pub fn other_problems(&self) -> impl Iterator<Item = &String> {
        let macs: Vec<_> = self.mac_mismatches.iter().map(ToString::to_string).collect();
        let counts = |line: &str| {
            let (number, rest) = line.split_once(' ')?;
            let number = number.parse().ok()?;
            COUNTED.into_iter().find(|(noun, state)| {
                format!("{number} {rest}") == format!("{} {state}", counted(number, noun))
            })
        };
        self.troubles.iter().filter(move |line| {
            !self.attachments.faults.contains(line) && !macs.contains(line) && counts(line).is_none()
        })
    }
}

/// What the host will do to a VM, as its guest is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingEvent {
    /// The VM's record.
    pub record: String,
    /// The VM's name.
    pub vm: String,
    /// The event, and what the guest said of it.
    #[serde(flatten)]
    pub event: AnnouncedEvent,
}

/// Frames for the metadata addresses from a MAC that no record has on their port: they are dropped. Noticed within the
/// last ten minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MacMismatch {
    /// The port.
    pub port: String,
    /// The MAC that sends the frames.
    pub mac: String,
    /// The MACs that the port expects.
    pub expected: Vec<ExpectedMac>,
    /// Seconds since such frames were last noticed, which is not at each frame; `None` from an agent that does not say
    /// it.
    #[serde(default)]
    pub ago: Option<f64>,
}

/// A MAC that a port expects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedMac {
    /// The MAC.
    pub mac: String,
    /// The record that has it; `None` if the configuration does.
    pub record: Option<String>,
}

impl MacMismatch {
    /// Says when such frames were last noticed, for the end of a sentence: a guest that is corrected may still be
    /// listed. Empty for those of this moment.
    #[must_use]
    pub fn noticed(&self) -> String {
        let ago = self.ago.filter(|ago| *ago >= 1.0);
        ago.map_or_else(String::new, |ago| format!(" (last noticed {ago:.0} s ago)"))
    }
}

impl fmt::Display for MacMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { port, mac, expected, .. } = self;
        write!(f, "{port}: frames from MAC {mac} are dropped, because ")?;
        let more = if expected.len() > NAMED_MACS { ", …" } else { "" };
        let expected: Vec<_> = expected.iter().take(NAMED_MACS).map(ToString::to_string).collect();
        match &expected[..] {
            [] => {
                write!(
                    f,
                    "no record has a NIC on this port{}; register the VM, or name the port in its record",
                    self.noticed()
                )
            }
            _ => write!(
                f,
                "{}{more} there{}; give the NIC the MAC that the guest uses, or have the guest use the NIC's",
                expected.join(", "),
                self.noticed()
            ),
        }
    }
}

impl fmt::Display for ExpectedMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} expects {}", self.record.as_deref().unwrap_or("the configuration"), self.mac)
    }
}

/// A UUID that several VMs have in their firmware.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedUuid {
    /// The UUID.
    pub uuid: String,
    /// Records of these VMs; at most [`LISTED_COMPLAINTS`].
    pub records: Vec<String>,
    /// Number of further records.
    #[serde(default)]
    pub unlisted: u64,
}

/// What the agent attached and pinned, compared with what the kernel has. The agent compares every 30 to 60 seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AttachmentStatus {
    /// Seconds since the last complete comparison; `None` before the first.
    pub checked: Option<f64>,
    /// What it found, a line for each kind of fault; also among the troubles.
    pub faults: Vec<String>,
    /// Faults found since the start, by kind.
    pub found: BTreeMap<String, u64>,
    /// Numbers of namespaces that are not used again, because it is not proven that programs with them are detached.
    pub retired: u64,
}

/// The issuer of identity tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuerState {
    /// `iss` of tokens.
    pub issuer: String,
    /// The signature algorithm.
    pub algorithm: String,
    /// Number of public keys.
    pub keys: u64,
    /// The `kid` of the key that signs; `None` without a key.
    pub signs: Option<String>,
    /// Time when the certificate for documents expires, in Unix seconds; `None` without one.
    #[serde(default)]
    pub certificate_expires: Option<u64>,
    /// The signer has ended: no token is signed until the agent is restarted.
    pub ended: bool,
    /// Tokens signed since the start.
    pub signed: u64,
}

/// The memory of all records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordMemory {
    /// Bytes that records use.
    pub used: u64,
    /// Bytes that records may use; the agent refuses records beyond.
    pub limit: u64,
}

/// A limit of the node that tenants share: each has at most half of what the others leave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The limit: `record_memory`, `vmis`, `vmi_bytes`, `volume_bytes`, `pods`, `ports`, `identities`, `events` or
    /// `refused_records`.
    pub limit: String,
    /// What all tenants hold.
    pub used: u64,
    /// What all tenants may hold.
    pub most: u64,
    /// Refusals since the start.
    pub refused: u64,
    /// The tenants that hold most, at most ten.
    pub tenants: Vec<TenantShare>,
}

/// What a tenant holds of a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantShare {
    /// `namespace/NAME` in Kubernetes, `vm/NUMBER` in Proxmox VE, or `operator`.
    pub tenant: String,
    /// What it holds.
    pub held: u64,
}

/// How a source of records can be read. Its last good records stay in force while it cannot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The source.
    pub source: RecordSource,
    /// What is read, such as `/etc/pve/qemu-server` or `the API server`.
    pub reads: String,
    /// Seconds since the first attempt.
    pub asked_for: f64,
    /// Seconds since it was last read whole, or since a server's last useful answer, by the worst of the agent's
    /// watches; `None` before the first time. A working API server answers at least every two minutes, even without
    /// changes.
    pub answered: Option<f64>,
    /// The party that is asked only when a guest asks, if there is one. It is not part of `reads` and `answered`.
    #[serde(default)]
    pub on_demand: Option<OnDemandStatus>,
    /// The failure, if the last attempt failed.
    pub failing: Option<FailedReads>,
    /// Requests that failed since the start, by kind.
    pub failures: BTreeMap<String, u64>,
    /// Conditions under which it is read nevertheless, such as a cluster without quorum.
    pub notes: Vec<String>,
}

impl SourceStatus {
    /// Seconds without a useful answer, by the worst of its parties.
    #[must_use]
    pub fn silence(&self) -> f64 {
        let read = self.answered.unwrap_or(self.asked_for);
        self.on_demand.as_ref().map_or(read, |party| read.max(party.away))
    }
}

/// A party of a source that is asked only when a guest asks, such as OpenStack's Nova.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OnDemandStatus {
    /// Its name and address, such as `Nova at http://10.0.0.10:8775`.
    pub name: String,
    /// Seconds since its last answer; `None` before the first.
    pub answered: Option<f64>,
    /// Seconds since it went away, or since the first attempt if it has never answered; 0 while it is not away.
    pub away: f64,
}

/// Consecutive failed attempts to read a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailedReads {
    /// Seconds since the first of them.
    pub since: f64,
    /// The kind of the last failure of a server: `unreachable`, `forbidden`, `not_found`, `gone`, `refused`, `unreadable`
    /// or `cut_short`. Empty for a directory.
    pub kind: String,
    /// The message of the server or the kernel.
    pub reason: String,
}

/// The phase of an agent's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The agent is not ready yet.
    #[default]
    Starting,
    /// The agent serves guests.
    Serving,
    /// The agent completes the requests it holds, and ends.
    Draining,
}

impl Phase {
    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
        }
    }
}

/// A worker and its hub.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// The hub's number.
    pub hub: u32,
    /// The device of its AF_XDP socket.
    pub device: String,
    /// Seconds since its last sign of life; `None` once it has ended.
    pub heartbeat: Option<f64>,
    /// Its busy share of the last seconds, 0 to 1.
    pub load: f64,
    /// Open connections.
    pub connections: u64,
    /// Slots with recent traffic.
    pub guests: u64,
    /// Requests answered since the start.
    pub requests: u64,
}

/// The ports: counts, and a list.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PortSummary {
    /// Number of ports by state.
    pub counts: BTreeMap<PortState, u64>,
    /// Number of attached ports by program.
    pub programs: BTreeMap<String, u64>,
    /// The listed ports.
    pub listed: Vec<PortStatus>,
    /// Number of ports beyond the limit of the list.
    pub unlisted: u64,
}

/// The state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortState {
    /// The port's guests are served.
    Attached,
    /// The port's interface does not exist yet.
    Waiting,
    /// The port has no record, and `guard: all` keeps it closed.
    Closed,
    /// The port cannot be attached, or some of its guests cannot be served.
    Error,
}

impl PortState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Attached, Self::Waiting, Self::Closed, Self::Error];

    /// Its name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::Waiting => "waiting",
            Self::Closed => "closed",
            Self::Error => "error",
        }
    }
}

/// A port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// `IFNAME`, or `IFNAME@NETNS`.
    pub name: String,
    /// The port's state.
    pub state: PortState,
    /// The reason, unless the port is attached.
    pub reason: Option<String>,
    /// The program that steers its traffic: `xdp` or `tcx`.
    pub program: Option<String>,
    /// How guests reach it.
    #[serde(default)]
    pub way: GuestWay,
    /// The number of its identities.
    pub identities: u64,
}

/// How a guest reaches its port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestWay {
    /// By its own device: a tap or an equivalent.
    #[default]
    Device,
    /// By the sockets of its pod, which other processes of the pod can use too (`kubevirt.passt`).
    Inlet,
}

/// The number of a source's records in one state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Instances {
    /// The source: `api`, `file`, `hook`, `kubevirt`, `proxmox` or `openstack`.
    pub source: String,
    /// The state.
    pub state: InstanceState,
    /// The number of records.
    pub count: u64,
}

/// The state of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceState {
    /// Every NIC with a port is served there.
    Served,
    /// A port of the record is not attached yet.
    Waiting,
    /// Another record has an identity that this one claims too.
    Contested,
    /// No NIC has a port.
    Unplaced,
    /// A record of a higher source is in force for the same VM.
    Shadowed,
    /// No version of the record was ever good.
    Rejected,
}

impl InstanceState {
    /// Every state.
    pub const ALL: [Self; 6] =
        [Self::Served, Self::Waiting, Self::Contested, Self::Unplaced, Self::Shadowed, Self::Rejected];

    /// Its name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Waiting => "waiting",
            Self::Contested => "contested",
            Self::Unplaced => "unplaced",
            Self::Shadowed => "shadowed",
            Self::Rejected => "rejected",
        }
    }
}

/// A record whose latest version is refused. An earlier good version stays in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedRecord {
    /// The record.
    pub record: String,
    /// The reason.
    pub reason: String,
}

/// A record shadowed by another of the same VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowedRecord {
    /// The record.
    pub record: String,
    /// The record in force.
    pub by: String,
}

/// A recent warning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecentWarning {
    /// `warn` or `error`.
    pub level: String,
    /// Seconds since its last occurrence.
    pub ago: f64,
    /// Consecutive occurrences.
    pub times: u64,
    /// The text of the log line.
    pub text: String,
}

/// The state of one guest, which is a MAC on a port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// The port; empty if none is known.
    pub port: String,
    /// The MAC; empty if none is known.
    pub mac: String,
    /// Its record, if there is one.
    pub record: Option<String>,
    /// The VM's name, from the record.
    pub vm: Option<String>,
    /// The VM's UUID, from the record.
    pub uuid: Option<String>,
    /// The owner of what the agent keeps and derives for its VM.
    #[serde(default)]
    pub owner: Option<String>,
    /// How its requests are answered.
    pub state: GuestState,
    /// The fault of its port, or why its record is not in force there.
    pub reason: Option<String>,
    /// What an operator should fix, although the guest is served.
    #[serde(default)]
    pub problem: Option<String>,
    /// Its slot on the node.
    pub slot: Option<u32>,
    /// The hub that serves it.
    pub hub: Option<u32>,
    /// The program that steers its port.
    pub program: Option<String>,
    /// How the guest reaches its port.
    #[serde(default)]
    pub way: GuestWay,
    /// The resources that its worker uses for it; `None` if it is not served or the worker is silent.
    pub held: Option<GuestUsage>,
    /// Events of its VM that are scheduled or have begun.
    #[serde(default)]
    pub events: Vec<AnnouncedEvent>,
}

/// The resources that a worker uses for a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestUsage {
    /// Open connections.
    pub connections: u64,
    /// Complete requests without an answer yet.
    pub requests: u64,
}

/// How the requests of a guest are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestState {
    /// From its record.
    Served,
    /// Not yet: they are held until its record arrives.
    Awaited,
    /// With 404, because its record is gone.
    Gone,
    /// Not at all: its port is not attached.
    Unbound,
    /// Not at all: its port accepts no redirected frames.
    Unreachable,
    /// Not at all: its record is not in force there.
    Unserved,
}

/// What the verb found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupOutcome {
    /// The agent is healthy, or every guest of the name is served.
    Healthy,
    /// An operator needs to act, or a guest is not served.
    Degraded,
    /// No guest has the name.
    Unknown,
}

/// Requests the status of a run directory's agent, and prints it as a table or as JSON.
///
/// # Errors
/// The agent does not answer, or its answer is invalid; or `out` cannot be written.
pub fn run(
    directory: &Path,
    guest: Option<&str>,
    all: bool,
    as_json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<LookupOutcome> {
    let path = match guest {
        Some(name) => format!(
            "/v1/status?{}",
            form_urlencoded::Serializer::new(String::new()).append_pair("guest", name).finish()
        ),
        None if all => "/v1/status?ports=all".into(),
        None => "/v1/status".into(),
    };
    let answer = get(directory, &path)?;
    if as_json {
        out.write_all(&answer)?;
        out.write_all(b"\n")?;
    }
    if let Some(name) = guest {
        let guests: Vec<GuestStatus> = serde_json::from_slice(&answer)?;
        if !as_json {
            table::guests(name, &guests, out)?;
        }
        let is_well = |guest: &GuestStatus| guest.state == GuestState::Served && guest.problem.is_none();
        return Ok(match &guests[..] {
            [] => LookupOutcome::Unknown,
            guests if guests.iter().all(is_well) => LookupOutcome::Healthy,
            _ => LookupOutcome::Degraded,
        });
    }
    let status: AgentStatus = serde_json::from_slice(&answer)?;
    if !as_json {
        table::status(&status, out)?;
    }
    Ok(if status.troubles.is_empty() { LookupOutcome::Healthy } else { LookupOutcome::Degraded })
}

#[cfg(test)]
mod tests {
    use super::{AgentStatus, AttachmentStatus, MacMismatch, OnDemandStatus, SourceStatus};

    #[test]
    fn problems_that_the_status_lists_apart_are_not_among_the_others() {
        let mismatch = MacMismatch { port: "tap0".into(), ..MacMismatch::default() };
        let mut status = AgentStatus {
            troubles: ["1 pin was removed", "tap0 says", "not on disk for web-1", "2 days late"]
                .map(Into::into)
                .into(),
            attachments: AttachmentStatus {
                faults: vec!["1 pin was removed".into()],
                ..AttachmentStatus::default()
            },
            ..AgentStatus::default()
        };
        status.troubles[1] = mismatch.to_string();
        status.mac_mismatches.push(mismatch);
        status.count_problems([1, 2, 0]);
        assert_eq!(status.troubles[4..], ["1 port in error", "2 records refused"]);
        assert_eq!(status.other_problems().collect::<Vec<_>>(), ["not on disk for web-1", "2 days late"]);
    }

    #[test]
    fn the_silence_of_a_source_is_that_of_the_party_that_is_away_longest() {
        for (answered, away, silence) in [
            (None, None, 900.0),
            (Some(3.0), None, 3.0),
            (Some(0.0), Some(0.0), 0.0),
            (Some(0.0), Some(600.0), 600.0),
            (Some(700.0), Some(600.0), 700.0),
            (None, Some(0.0), 900.0),
        ] {
            // How long nobody has asked is no silence.
            let party = |away| OnDemandStatus { answered: Some(5_000.0), away, ..OnDemandStatus::default() };
            let on_demand = away.map(party);
            let status = SourceStatus { asked_for: 900.0, answered, on_demand, ..SourceStatus::default() };
            assert!((status.silence() - silence).abs() < f64::EPSILON, "{status:?}");
        }
    }
}
