//! Faults of the node at each point of a VM's life: a full disk, no descriptors, a stopped agent, damaged files, a clock
//! that jumps.
//!
//! The law after each: nothing that was acknowledged is lost, nothing is served to another guest, and everything comes
//! back by itself or the agent says what to do.
//!
//! A run tries some cells of the table, chosen by the seed; with `XDP_IMDS_FAULTS=all` it tries each. A line per cell
//! says what was tried. `XDP_IMDS_FAULTS=FAULT/POINT` tries one.

mod node;

use anyhow::{Context as _, Result, bail, ensure};
use node::{Fault, Node, PATIENCE};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use support::agent::Agent;
use support::eventually;
use support::exposition::total;
use support::record::Identity;
use support::{privileged, seed};

/// Which cells to try: `all`, or the name of one. Without it, [`CELLS`] of them.
const CHOICE: &str = "XDP_IMDS_FAULTS";
/// Cells of one table that a run tries without [`CHOICE`].
const CELLS: usize = 4;

/// The cells to try, by name.
fn chosen<T>(cells: Vec<(String, T)>) -> Vec<(String, T)> {
    let choice = std::env::var(CHOICE).unwrap_or_default();
    if choice == "all" {
        return cells;
    }
    if !choice.is_empty() {
        return cells.into_iter().filter(|(name, _)| *name == choice).collect();
    }
    let mut cells = cells;
    fastrand::Rng::with_seed(seed()).shuffle(&mut cells);
    cells.truncate(CELLS);
    cells
}

/// Tries each cell, and fails at the end with the names of those that break the law.
fn try_each<T>(cells: Vec<(String, T)>, run: impl Fn(T) -> Result<()>) {
    let mut broken = Vec::new();
    for (name, cell) in chosen(cells) {
        let begun = Instant::now();
        let result = run(cell);
        eprintln!(
            "{name}: {} in {:.1} s",
            if result.is_ok() { "held" } else { "BROKEN" },
            begun.elapsed().as_secs_f32()
        );
        if let Err(error) = result {
            broken.push(format!("{name}: {error:#}"));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n\n"));
}

#[privileged::test]
fn faults_of_the_node_lose_nothing_acknowledged_and_pass() {
    let cells = Fault::ALL.into_iter().flat_map(|fault| Point::ALL.map(|point| (fault, point)));
    let named = cells.map(|(fault, point)| (format!("{fault:?}/{point:?}"), (fault, point))).collect();
    try_each(named, |(fault, point)| {
        let node = Node::new()?;
        let mut life = Life::begin(&node)?;
        life.meet(fault, point)?;
        life.assert_law()
    });
}

#[privileged::test]
fn damaged_files_cost_no_other_guest_anything_and_are_named() {
    let cells = Damage::ALL.into_iter().flat_map(|damage| Moment::ALL.map(|moment| (damage, moment)));
    let named = cells.map(|(damage, moment)| (format!("{damage:?}/{moment:?}"), (damage, moment))).collect();
    try_each(named, |(damage, moment)| damage_at(&Node::new()?, damage, moment));
}

// Damaged files of the state directory: before a start, while an agent runs, and before a takeover.

/// A file of the state directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    TokenKeys,
    Mailbox,
    Dialects,
    Snapshot,
    Registration,
}

/// When the file is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// After an agent stopped, before the next one starts.
    BeforeStart,
    /// While an agent runs, which is killed afterwards.
    Running,
    /// While an agent runs, from which another one takes over.
    BeforeTakeover,
}

impl Damage {
    const ALL: [Self; 5] =
        [Self::TokenKeys, Self::Mailbox, Self::Dialects, Self::Snapshot, Self::Registration];

    fn path(self, node: &Node) -> Result<PathBuf> {
        let state = node.state();
        Ok(match self {
            Self::TokenKeys => state.join("token.key"),
            Self::Mailbox => node.mailbox(0)?,
            Self::Dialects => state.join("dialects"),
            Self::Snapshot => state.join("records.snapshot"),
            Self::Registration => {
                let mut entries = fs::read_dir(state.join("instances"))?;
                entries.next().context("no registration is on disk")??.path()
            }
        })
    }

    /// What the next agent says of the file. A snapshot is read only while its source is unavailable.
    fn is_named_by(self) -> Option<&'static str> {
        match self {
            Self::TokenKeys => Some("the file is set aside, and rewritten"),
            Self::Mailbox => Some("cannot read the VM's mailbox"),
            Self::Dialects => Some("dialects that guests asked for before"),
            Self::Snapshot => None,
            Self::Registration => Some("register the VM again, or remove the file"),
        }
    }
}

impl Moment {
    const ALL: [Self; 3] = [Self::BeforeStart, Self::Running, Self::BeforeTakeover];
}

/// Damages a file: empties it, cuts it, or fills it with other bytes of the same number.
fn damage(path: &PathBuf, how: u8) -> Result<()> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let damaged = match how % 3 {
        0 => Vec::new(),
        1 => bytes[..bytes.len() / 2].to_vec(),
        _ => vec![0xa5; bytes.len()],
    };
    // In place, so that its mode stays.
    fs::write(path, damaged)?;
    Ok(())
}

/// Damages a file at a moment, in each way. The next agent starts, says so, and serves both guests; what the other guest
/// wrote is there; what is written afterwards is kept.
fn damage_at(node: &Node, file: Damage, moment: Moment) -> Result<()> {
    let mut agent = node.agent(&[])?;
    ensure!(node.api("PUT", "/registered", &Identity::of(9).record(1), PATIENCE)? < 300, "registered");
    for how in 0..3 {
        for guest in [0, 1] {
            ensure!(node.put_attribute(guest, "key", &format!("{guest}-{how}"))? == 200, "an attribute");
        }
        // Each file is there once what it holds has been written.
        let path = match (file, moment) {
            (Damage::TokenKeys | Damage::Registration, _) | (Damage::Mailbox, _) => {
                eventually(PATIENCE, || {
                    let path = file.path(node)?;
                    ensure!(fs::metadata(&path)?.len() > 0);
                    ensure!(
                        on_disk(node, 1, &format!("{}-{how}", 1))?,
                        "the other guest's write is not on disk"
                    );
                    Ok(path)
                })?
            }
            // These are written at the end of an agent at the latest.
            _ => {
                ensure!(agent.stop()?.success(), "an agent stops");
                agent = node.agent(&[])?;
                file.path(node)?
            }
        };
        agent = match moment {
            Moment::BeforeStart => {
                ensure!(agent.stop()?.success(), "an agent stops");
                damage(&path, how)?;
                node.agent(&[])?
            }
            Moment::Running => {
                damage(&path, how)?;
                node.assert_own(0)?;
                node.assert_own(1)?;
                agent.kill()?;
                node.agent(&[])?
            }
            Moment::BeforeTakeover => {
                damage(&path, how)?;
                let next = node.agent(&["--takeover"])?;
                agent.ended(Duration::from_secs(60))?;
                next
            }
        };
        if let Some(said) = file.is_named_by() {
            ensure!(agent.eventually_logs(said), "no `{said}` in its log:\n{}", agent.log());
        }
        eventually(PATIENCE, || [0, 1].into_iter().try_for_each(|guest| node.assert_own(guest)))?;
        let (status, found) = node.attribute(1, "key")?;
        ensure!((status, found.as_str()) == (200, &*format!("1-{how}")), "the other guest: {status} {found}");
        ensure!(node.put_attribute(0, "after", "it works")? == 200, "a write afterwards");
        ensure!(node.attribute(0, "after")?.1 == "it works", "a read afterwards");
        ensure!(node.attribute(1, "after")?.0 == 404, "the other guest has it too");
        ensure!(
            node.api("PUT", "/registered", &Identity::of(9).record(1), PATIENCE)? < 300,
            "registered again"
        );
    }
    Ok(())
}

fn on_disk(node: &Node, guest: usize, value: &str) -> Result<bool> {
    use base64::Engine as _;
    let text = fs::read_to_string(node.mailbox(guest)?)?;
    Ok(text.contains(&base64::engine::general_purpose::STANDARD.encode(value)))
}

// A VM's life, the points at which a fault meets it, and the law afterwards.

/// The guest that meets the fault.
const GUEST: usize = 0;
/// The guest beside it.
const OTHER: usize = 1;
/// How long a fault lasts at least, and at most while guests are not answered.
const LASTS: Duration = Duration::from_millis(1_500);
/// A VM that is registered with the API and has no port.
const REGISTERED: &str = "/registered";

/// A point of a VM's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    /// A VM is registered by the API.
    Registered,
    /// The first request of a guest.
    FirstRequest,
    /// A request waits for a change of the record.
    LongPoll,
    /// A guest writes an attribute.
    Attribute,
    /// A guest posts a password, and confirms its one-shot password.
    Password,
    /// The VM's record is removed and then registered again.
    Removed,
    /// Another agent takes over.
    TakenOver,
}

impl Point {
    const ALL: [Self; 7] = [
        Self::Registered,
        Self::FirstRequest,
        Self::LongPoll,
        Self::Attribute,
        Self::Password,
        Self::Removed,
        Self::TakenOver,
    ];
}

/// Something that was acknowledged, and must be there afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Acknowledged {
    Attribute(usize, &'static str),
    Password,
    OneShotTaken,
    Registration,
}

/// The agent in charge, and what was acknowledged so far.
struct Life<'a> {
    node: &'a Node,
    agent: Option<Agent<'a>>,
    acknowledged: Vec<Acknowledged>,
}

impl<'a> Life<'a> {
    /// Starts an agent; each guest is served and has written something.
    fn begin(node: &'a Node) -> Result<Self> {
        let agent = node.agent(&[])?;
        let mut life = Self { node, agent: Some(agent), acknowledged: Vec::new() };
        for guest in [GUEST, OTHER] {
            ensure!(node.put_attribute(guest, "before", &text(guest, "before"))? == 200, "an attribute");
            life.acknowledged.push(Acknowledged::Attribute(guest, "before"));
        }
        Ok(life)
    }

    fn agent(&self) -> Result<&Agent<'a>> {
        self.agent.as_ref().context("an agent is in charge")
    }

    /// Lets the fault meet the VM at a point, and ends it.
    fn meet(&mut self, fault: Fault, point: Point) -> Result<()> {
        let node = self.node;
        let begun = fault.begin(node, self.agent()?.pid())?;
        let (done, ended) = channel();
        let (results, next) = std::thread::scope(|scope| {
            let acting = scope.spawn(move || {
                let result = act(node, point);
                // The receiver may have stopped waiting.
                let _ = done.send(());
                result
            });
            // What the guest does ends while the fault lasts, unless nobody is answered meanwhile.
            let limit = if fault.answers() && point != Point::LongPoll { PATIENCE } else { LASTS };
            let _ = ended.recv_timeout(limit);
            let seen = self.look_during(fault, point);
            // A long poll is answered by a change that comes after the fault.
            drop(begun);
            if point == Point::LongPoll {
                self.wait_until_parked()?;
                node.write(GUEST, 2, "blue")?;
            }
            let results = acting.join().map_err(|_| anyhow::anyhow!("the guest's thread panicked"))?;
            seen.map(|next| (results, next))
        })?;
        if let Some(next) = next {
            self.agent = Some(next);
        }
        self.acknowledged.extend(results?);
        // Whatever was refused during the fault works afterwards.
        let again = eventually(PATIENCE, || {
            let more = act_afterwards(node, point)?;
            Ok(more)
        });
        self.acknowledged.extend(again.with_context(|| format!("{point:?} after the fault"))?);
        if point == Point::TakenOver {
            self.take_over()?;
        }
        Ok(())
    }

    /// Waits until the agent holds a request that waits for a change.
    fn wait_until_parked(&self) -> Result<()> {
        eventually(PATIENCE, || {
            let parked =
                total(&self.agent()?.metrics()?, "xdp_imds_parked_requests", Some(("reason", "change")));
            ensure!(parked == 1, "{parked} requests wait");
            Ok(())
        })
    }

    /// What an operator sees while the fault lasts. Returns the next agent if it took over meanwhile.
    fn look_during(&self, fault: Fault, point: Point) -> Result<Option<Agent<'a>>> {
        let node = self.node;
        if fault.blocks_writes() && matches!(point, Point::Attribute | Point::Password | Point::TakenOver) {
            ensure!(
                node.put_attribute(OTHER, "during", &text(OTHER, "during"))? == 200,
                "the write of a guest"
            );
            eventually(PATIENCE, || {
                let troubles = node.status()?.troubles;
                ensure!(
                    troubles.iter().any(|trouble| {
                        trouble.contains("not on disk for")
                            && trouble.contains("make room in the state directory")
                    }),
                    "status says nothing of it: {troubles:?}"
                );
                Ok(())
            })?;
        }
        if point != Point::TakenOver || !fault.answers() {
            return Ok(None);
        }
        match node.agent(&["--takeover"]) {
            Ok(next) if fault.blocks_writes() => {
                bail!("an agent took over what the former one could not write:\n{}", next.log())
            }
            Ok(next) => Ok(Some(next)),
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(
                    !fault.blocks_writes()
                        || text.contains("not on disk")
                        || text.contains("state directory"),
                    "the refusal says nothing of it: {text}"
                );
                Ok(None)
            }
        }
    }

    fn take_over(&mut self) -> Result<()> {
        // The agent refuses until its workers serve again after a takeover that failed.
        let next = eventually(PATIENCE, || self.node.agent(&["--takeover"]))?;
        if let Some(former) = self.agent.replace(next) {
            let (status, said) = former.ended(PATIENCE)?;
            ensure!(status.success(), "the agent did not hand over, but ended by itself ({status}):\n{said}");
        }
        Ok(())
    }

    /// The law: everything is back, nothing is lost, nothing went to another guest; also after a crash.
    fn assert_law(mut self) -> Result<()> {
        let node = self.node;
        eventually(PATIENCE, || {
            let troubles = node.status()?.troubles;
            ensure!(troubles.is_empty(), "{troubles:?}");
            [GUEST, OTHER].into_iter().try_for_each(|guest| node.assert_own(guest))
        })
        .context("after the fault")?;
        self.assert_kept().with_context(|| format!("after the fault; the agent's log:\n{}", self.log()))?;
        // All that is acknowledged is on disk once the agent has no trouble and its pause is over.
        eventually(PATIENCE, || {
            let metrics = self.agent()?.metrics()?;
            let of = |name: &str| {
                metrics.samples().iter().find(|sample| sample.name == name).map(|sample| sample.value)
            };
            ensure!(of("xdp_imds_state_unsaved_files") == Some(0.0), "files are not written");
            self.assert_on_disk()
        })
        .context("on disk")?;
        self.agent.take().context("an agent is in charge")?.kill()?;
        self.agent = Some(node.agent(&[])?);
        eventually(PATIENCE, || [GUEST, OTHER].into_iter().try_for_each(|guest| node.assert_own(guest)))
            .context("after a crash")?;
        self.assert_kept().with_context(|| format!("after a crash; the agent's log:\n{}", self.log()))
    }

    fn log(&self) -> String {
        self.agent.as_ref().map(Agent::log).unwrap_or_default()
    }

    /// What a guest writes is acknowledged before it is on disk, so a crash may follow only afterwards.
    fn assert_on_disk(&self) -> Result<()> {
        for kept in &self.acknowledged {
            let (guest, path) = match kept {
                Acknowledged::Attribute(guest, key) => (*guest, format!("/attributes/faults/{key}")),
                Acknowledged::Password => (GUEST, "/posted_password".into()),
                Acknowledged::OneShotTaken => (GUEST, "/taken_password".into()),
                Acknowledged::Registration => continue,
            };
            let file: Value = serde_json::from_slice(&fs::read(self.node.mailbox(guest)?)?)?;
            ensure!(file.pointer(&path).is_some_and(Value::is_string), "{kept:?} is not in {file}");
        }
        Ok(())
    }

    fn assert_kept(&self) -> Result<()> {
        let node = self.node;
        for kept in &self.acknowledged {
            match *kept {
                Acknowledged::Attribute(guest, key) => {
                    let (status, found) = node.attribute(guest, key)?;
                    ensure!((status, &found) == (200, &text(guest, key)), "{kept:?}: {status} {found}");
                }
                Acknowledged::Password => {
                    let found = node.posted_password(GUEST)?;
                    ensure!(found == text(GUEST, "password"), "{kept:?}: {found}");
                    ensure!(
                        node.posted_password(OTHER)?.is_empty(),
                        "the other guest has this one's password"
                    );
                }
                Acknowledged::OneShotTaken => {
                    let found = node.one_shot(GUEST, "send_my_password")?;
                    ensure!(found == "saved_password", "{kept:?}: the password came back: {found}");
                    let other = node.one_shot(OTHER, "send_my_password")?;
                    ensure!(other == format!("one-shot-{OTHER}"), "the other guest: {other}");
                }
                Acknowledged::Registration => {
                    let status = node.api("GET", REGISTERED, "", PATIENCE)?;
                    ensure!(status == 200, "{kept:?}: {status}");
                }
            }
        }
        Ok(())
    }
}

/// What a guest writes, which no other guest writes.
fn text(guest: usize, key: &str) -> String {
    format!("{key}-of-guest-{guest}")
}

/// What the VM does during the fault. Returns what was acknowledged; a refusal is no failure.
fn act(node: &Node, point: Point) -> Result<Vec<Acknowledged>> {
    let mut acknowledged = Vec::new();
    match point {
        Point::Registered => acknowledged.extend(register(node).unwrap_or_default()),
        Point::FirstRequest => {
            // A failed request is repeated by the guest; an answer must be its own.
            let _ = node.guests[GUEST].fetch_own("/v1/user-data", node::REQUEST);
        }
        Point::LongPoll => {
            let (status, colour) = node.wait_for_colour(GUEST)?;
            ensure!((status, &*colour) == (200, "blue"), "the waiting request got {status} {colour}");
        }
        Point::Attribute | Point::TakenOver => acknowledged.extend(put(node).unwrap_or_default()),
        Point::Password => acknowledged.extend(post(node).unwrap_or_default()),
        Point::Removed => {
            fs::remove_file(node.guests[GUEST].identity().path(node.records.path()))?;
            let _ = node.assert_own(OTHER);
        }
    }
    Ok(acknowledged)
}

/// The same once the fault is over, when it must succeed.
fn act_afterwards(node: &Node, point: Point) -> Result<Vec<Acknowledged>> {
    let done = match point {
        Point::Registered => register(node)?,
        Point::FirstRequest | Point::LongPoll => vec![],
        Point::Attribute | Point::TakenOver => put(node)?,
        Point::Password => post(node)?,
        Point::Removed => {
            node.write(GUEST, 3, "red")?;
            vec![]
        }
    };
    node.assert_own(GUEST)?;
    Ok(done)
}

fn register(node: &Node) -> Result<Vec<Acknowledged>> {
    let record = Identity::of(9).record(1);
    let status = node.api("PUT", REGISTERED, &record, Duration::from_secs(5))?;
    ensure!(matches!(status, 200 | 201), "refused: {status}");
    Ok(vec![Acknowledged::Registration])
}

fn put(node: &Node) -> Result<Vec<Acknowledged>> {
    let status = node.put_attribute(GUEST, "key", &text(GUEST, "key"))?;
    ensure!(status == 200, "refused: {status}");
    Ok(vec![Acknowledged::Attribute(GUEST, "key")])
}

fn post(node: &Node) -> Result<Vec<Acknowledged>> {
    let status = node.post_password(GUEST, &text(GUEST, "password"))?;
    ensure!(matches!(status, 200 | 204 | 409), "refused: {status}");
    let taken = node.one_shot(GUEST, "saved_password")?;
    ensure!(taken == "saved_password", "refused: {taken}");
    Ok(vec![Acknowledged::Password, Acknowledged::OneShotTaken])
}
