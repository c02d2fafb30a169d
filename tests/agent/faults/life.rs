//! A VM's life, the points at which a fault meets it, and the law afterwards.

use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use support::agent::Agent;
use support::books::total;
use support::eventually::eventually;
use support::record::Identity;

use super::fault::Fault;
use super::node::{Node, PATIENCE};

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
pub(crate) enum Point {
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
    pub(crate) const ALL: [Self; 7] = [
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
pub(crate) struct Life<'a> {
    node: &'a Node,
    agent: Option<Agent<'a>>,
    acknowledged: Vec<Acknowledged>,
}

impl<'a> Life<'a> {
    /// Starts an agent; each guest is served and has written something.
    pub(crate) fn begin(node: &'a Node) -> Result<Self> {
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
    pub(crate) fn meet(&mut self, fault: Fault, point: Point) -> Result<()> {
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
    pub(crate) fn assert_law(mut self) -> Result<()> {
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
            let file: Value = serde_json::from_slice(&std::fs::read(self.node.mailbox(guest)?)?)?;
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
            let _ = node.guests[GUEST].fetch_own("/v1/user-data", super::node::REQUEST);
        }
        Point::LongPoll => {
            let (status, colour) = node.wait_for_colour(GUEST)?;
            ensure!((status, &*colour) == (200, "blue"), "the waiting request got {status} {colour}");
        }
        Point::Attribute | Point::TakenOver => acknowledged.extend(put(node).unwrap_or_default()),
        Point::Password => acknowledged.extend(post(node).unwrap_or_default()),
        Point::Removed => {
            std::fs::remove_file(node.guests[GUEST].identity().path(node.records.path()))?;
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
