//! `xdp-imds status`: how an agent is, at one look, or how one of its guests is.
//!
//! The agent answers `GET /v1/status` on its control socket with a [`Status`] as JSON, and with `?guest=NAME` with
//! a list of [`Guest`]; the verb prints either as a table, or the JSON as it came. The fields are those of the
//! types below, by these names; further ones may be added, none changes its meaning within [`SCHEMA`]. Times are
//! in seconds. Nothing of a record is in it but the names of record, VM, port and MAC.

mod client;
mod table;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use client::{Answer, ClientError, Question, Reply, ask, get, open};

/// What the fields mean: raised when one changes its meaning or goes.
pub const SCHEMA: &str = "status/1";
/// Ports listed unless all are asked for; the others are counted.
pub const LISTED_PORTS: usize = 64;
/// Conflicts listed, and refused records.
pub const LISTED_COMPLAINTS: usize = 32;
/// Guests told of under one name.
pub const LISTED_GUESTS: usize = 64;

/// Which ports are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// Those that are not attached, [`LISTED_PORTS`] at most.
    Trouble,
    /// Every port.
    EveryPort,
}

/// How the agent is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`].
    pub schema: String,
    /// The agent's version.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Where it pins programs and maps; none if it pins nothing.
    #[serde(default)]
    pub pins: Option<PathBuf>,
    /// Seconds since it started.
    pub uptime: f64,
    /// `/healthz` says yes.
    pub live: bool,
    /// `/readyz` says yes.
    pub ready: bool,
    /// Where it is in its life.
    pub phase: Phase,
    /// Of the two sides of a node that take turns with each takeover, the one it is on: 0 or 1.
    pub side: u32,
    /// Records come from the snapshot, because their source is away.
    pub from_snapshot: bool,
    /// Ports of an agent before, still closed, that no record has named yet.
    pub has_left: bool,
    /// What an operator should do something about, a line each; empty when the agent is healthy.
    pub troubles: Vec<String>,
    /// The workers, one for each hub.
    pub workers: Vec<Worker>,
    /// The ports.
    pub ports: Ports,
    /// Records, by where they came from and what has become of them.
    pub instances: Vec<Instances>,
    /// MACs on ports that are known to the kernel.
    pub identities: u64,
    /// Records that claim what another has, or that fit several ports: [`LISTED_COMPLAINTS`] at most.
    pub conflicts: Vec<String>,
    /// Records that are refused as they are now: [`LISTED_COMPLAINTS`] at most.
    pub refused: Vec<Refused>,
    /// Records that wait behind one of a higher source: [`LISTED_COMPLAINTS`] at most.
    #[serde(default)]
    pub shadowed: Vec<Shadowed>,
    /// How the API server answers; none without a feed that asks it.
    #[serde(default)]
    pub api_server: Option<ApiServer>,
    /// What records take of memory, by an upper estimate.
    #[serde(default)]
    pub record_memory: RecordMemory,
    /// Counters since the start that are 0 on a node where all is well.
    pub counters: BTreeMap<String, u64>,
    /// What has been warned of lately, the newest last.
    pub lately: Vec<Said>,
}

/// Memory of all records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordMemory {
    /// Octets they take.
    pub used: u64,
    /// Octets they may take; records beyond are refused.
    pub limit: u64,
}

/// How the API server of a cluster answers. The agent has several watches; the worst of them counts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ApiServer {
    /// Seconds since the agent began to ask it.
    pub asked_for: f64,
    /// Seconds since its last useful answer; none when a watch has never had one. It answers at least once in two
    /// minutes, also when nothing changes.
    pub answered: Option<f64>,
    /// What is wrong, when the last request failed.
    pub failing: Option<Unanswered>,
    /// Requests that failed since the start, by kind.
    pub failures: BTreeMap<String, u64>,
}

impl ApiServer {
    /// Seconds without a useful answer.
    #[must_use]
    pub fn silence(&self) -> f64 {
        self.answered.unwrap_or(self.asked_for)
    }
}

/// A row of requests that fail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unanswered {
    /// Seconds since the first of them.
    pub since: f64,
    /// Of what kind the last failure is: `unreachable`, `forbidden`, `not_found`, `gone`, `refused`, `unreadable` or
    /// `cut_short`.
    pub kind: String,
    /// What the server or the kernel reported.
    pub reason: String,
}

/// Where an agent is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It is not ready yet.
    #[default]
    Starting,
    /// Guests are served.
    Serving,
    /// It serves what it holds, and ends.
    Draining,
}

impl Phase {
    /// Its name, as in JSON.
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
pub struct Worker {
    /// The hub's number.
    pub hub: u32,
    /// The device its socket is bound to.
    pub device: String,
    /// Seconds since its last sign of life; none when it has ended.
    pub heartbeat: Option<f64>,
    /// Part of the last seconds it was not asleep, 0 to 1.
    pub load: f64,
    /// Connections held.
    pub connections: u64,
    /// Slots that have spoken lately.
    pub guests: u64,
    /// Requests answered since the start.
    pub requests: u64,
}

/// The ports, counted and listed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ports {
    /// By state.
    pub counts: BTreeMap<PortState, u64>,
    /// Of those attached, how many each program steers.
    pub programs: BTreeMap<String, u64>,
    /// Ports one by one.
    pub listed: Vec<Port>,
    /// Ports that would have been listed, too.
    pub unlisted: u64,
}

/// What has become of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PortState {
    /// Its guests are served.
    Attached,
    /// Its interface is not there yet.
    Waiting,
    /// It has no record, and `guard: all` keeps it closed.
    Closed,
    /// It cannot be attached, or not all of its guests can be served.
    Error,
}

impl PortState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Attached, Self::Waiting, Self::Closed, Self::Error];

    /// Its name, as in JSON and in metrics.
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
pub struct Port {
    /// `IFNAME`, or `IFNAME@NETNS`.
    pub name: String,
    /// What has become of it.
    pub state: PortState,
    /// Why, unless it is attached.
    pub reason: Option<String>,
    /// The program that steers it: `xdp` or `tcx`.
    pub program: Option<String>,
    /// How its guests reach it.
    #[serde(default)]
    pub way: GuestWay,
    /// MACs that may speak there.
    pub identities: u64,
}

/// How guests reach a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestWay {
    /// By a device of their own: a tap, or what stands for one.
    #[default]
    Device,
    /// By the sockets of their pod, whose other processes reach it, too (`kubevirt.passt`).
    Inlet,
}

/// How many records of a source are in a state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Instances {
    /// Where they came from: `api`, `file`, `hook` or `kubevirt`.
    pub source: String,
    /// What has become of them.
    pub state: InstanceState,
    /// How many.
    pub count: u64,
}

/// What has become of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceState {
    /// Each of its NICs that has a port is served there.
    Served,
    /// Some port of its is not attached yet.
    Waiting,
    /// Another record has a MAC on a port that this one claims, too.
    Contested,
    /// None of its NICs has a port.
    Unplaced,
    /// One of a higher source is of the same VM: it waits until that goes.
    Shadowed,
    /// It cannot be used, and no earlier one could.
    Rejected,
}

impl InstanceState {
    /// Every state.
    pub const ALL: [Self; 6] =
        [Self::Served, Self::Waiting, Self::Contested, Self::Unplaced, Self::Shadowed, Self::Rejected];

    /// Its name, as in JSON and in metrics.
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

/// A record that is refused; what it said before, if it was good, still holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The record.
    pub record: String,
    /// Why.
    pub reason: String,
}

/// A record that waits behind another of its VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shadowed {
    /// The record.
    pub record: String,
    /// The one that is in force.
    pub by: String,
}

/// Something that was warned of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Said {
    /// `warn` or `error`.
    pub level: String,
    /// Seconds since it was said last.
    pub ago: f64,
    /// How often it was said, one time after the other.
    pub times: u64,
    /// What.
    pub text: String,
}

/// How one guest is: a MAC on a port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guest {
    /// The port.
    pub port: String,
    /// The MAC.
    pub mac: String,
    /// Its record, if there is one.
    pub record: Option<String>,
    /// The VM's name, by its record.
    pub vm: Option<String>,
    /// The VM's UUID, by its record.
    pub uuid: Option<String>,
    /// What its requests get.
    pub state: GuestState,
    /// What is wrong with its port.
    pub reason: Option<String>,
    /// The number it goes by on the node.
    pub slot: Option<u32>,
    /// The hub that serves it.
    pub hub: Option<u32>,
    /// The program that steers its port.
    pub program: Option<String>,
    /// How it reaches its port.
    #[serde(default)]
    pub way: GuestWay,
    /// What its worker holds for it; none when it is not served or the worker is silent.
    pub held: Option<Held>,
}

/// What is held for a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Open connections.
    pub connections: u64,
    /// Complete requests that wait for their answer.
    pub requests: u64,
}

/// What a guest's requests get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestState {
    /// Its record's answers.
    Served,
    /// They are held until its record comes.
    Awaited,
    /// 404, because its record has gone.
    Gone,
    /// Nothing: its port is not attached.
    Unbound,
    /// Nothing: its port takes no redirected frames.
    Unreachable,
}

/// How a look ended: the exit codes of the verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All is well.
    Healthy = 0,
    /// Something is to be done; or, of a guest, nothing is known.
    Degraded = 1,
    /// There is no agent to ask.
    NoAgent = 2,
}

/// Asks the agent of a run directory and prints what it says, as a table or as the JSON itself.
///
/// # Errors
/// It does not answer, or not as it should; or `out` takes nothing.
pub fn run(
    directory: &Path,
    guest: Option<&str>,
    all: bool,
    as_json: bool,
    out: &mut dyn Write,
) -> anyhow::Result<Outcome> {
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
        let guests: Vec<Guest> = serde_json::from_slice(&answer)?;
        if !as_json {
            table::guests(name, &guests, out)?;
        }
        let served = !guests.is_empty() && guests.iter().all(|guest| guest.state == GuestState::Served);
        return Ok(if served { Outcome::Healthy } else { Outcome::Degraded });
    }
    let status: Status = serde_json::from_slice(&answer)?;
    if !as_json {
        table::status(&status, out)?;
    }
    Ok(if status.troubles.is_empty() { Outcome::Healthy } else { Outcome::Degraded })
}
