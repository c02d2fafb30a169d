//! How the node is, for people.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use metadata_common::verdict::Verdict;
use metadata_feed::contact::{Failing, Report};
use tokio::sync::oneshot;
use tracing::warn;

use super::ports::{ABSENT, BY_CLASSIFIER};
use super::{Node, Serves};
use crate::agent::health::Health;
use crate::agent::slots::IdentityName;
use crate::recent;
use metadata_base::port::PortName;
use metadata_content::source::Source;
use metadata_control::status::{
    About, ApiServer, Guest, GuestState, GuestWay, InstanceState, Instances, LISTED_COMPLAINTS,
    LISTED_GUESTS, LISTED_PORTS, Phase, Port, PortState, Ports, RecordMemory, Refused, SCHEMA, Shadowed,
    Status, Unanswered, Worker,
};
use metadata_datapath::stack::SlotStats;
use metadata_feed::registry::{RecordId, Standing};
use metadata_links::inlet;
use metadata_serve::{End, Reason, Tally};
use metadata_steer::{By, Way};

/// A guest, and what its worker will say it holds.
pub(in crate::agent) type Asked = (Guest, Option<oneshot::Receiver<SlotStats>>);

impl Node {
    /// How the node is at this moment.
    #[must_use]
    pub(in crate::agent) fn status(&self, about: About, health: &Health) -> Status {
        let (conflicts, refused) = (self.conflicts(), self.refusals());
        let ports = self.ports_now(about);
        let mut status = Status {
            schema: SCHEMA.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            pins: self.steering.pins().map(Path::to_owned),
            uptime: self.started.elapsed().as_secs_f64(),
            live: health.deadly().next().is_none(),
            ready: health.hindering().next().is_none(),
            phase: match (health.is_draining(), health.is_settled()) {
                (true, _) => Phase::Draining,
                (false, true) => Phase::Serving,
                (false, false) => Phase::Starting,
            },
            side: self.steering.side(),
            from_snapshot: self.from_snapshot,
            has_left: self.steering.has_left(),
            troubles: health.hindering().map(|trouble| trouble.to_string()).collect(),
            workers: self.workers_now(health),
            ports,
            instances: self.instances(),
            identities: self.bound.len() as u64,
            conflicts,
            refused,
            shadowed: self.shadowed(),
            api_server: self.api_server(),
            record_memory: {
                let usage = self.room.usage();
                RecordMemory { used: usage.used as u64, limit: usage.limit as u64 }
            },
            counters: self.troubling(),
            lately: recent::last(),
        };
        self.complain(&mut status);
        status
    }

    /// What an operator should do something about, beside what keeps the agent from being ready.
    fn complain(&self, status: &mut Status) {
        if self.from_snapshot {
            status.troubles.push("records come from the snapshot: their source is away".into());
        }
        if let Some(failing) = status.api_server.as_ref().and_then(|server| server.failing.as_ref()) {
            let Unanswered { since, kind, reason } = failing;
            status
                .troubles
                .push(format!("requests to the API server have failed for {since:.0} s: {kind}: {reason}"));
        }
        let errors = status.ports.counts.get(&PortState::Error).copied().unwrap_or_default();
        let conflicts = self.plan.conflicts().count() as u64;
        for (count, what) in [
            (errors, "ports in error"),
            (self.registry.refused().count() as u64, "records refused"),
            (conflicts, "records in conflict"),
        ] {
            if count > 0 {
                status.troubles.push(format!("{count} {what}"));
            }
        }
    }

    /// How the API server answers.
    pub(super) fn api_server(&self) -> Option<ApiServer> {
        let Report { asked_for, answered, failing, failures } =
            self.api_server.as_ref()?.report(Instant::now());
        let failing = failing.map(|Failing { since, kind, reason }| Unanswered { since, kind, reason });
        Some(ApiServer { asked_for, answered, failing, failures })
    }

    fn conflicts(&self) -> Vec<String> {
        self.plan.conflicts().take(LISTED_COMPLAINTS).map(|conflict| conflict.to_string()).collect()
    }

    fn refusals(&self) -> Vec<Refused> {
        let refused = self.registry.refused().take(LISTED_COMPLAINTS);
        refused.map(|(id, reason)| Refused { record: id.to_string(), reason: reason.to_owned() }).collect()
    }

    fn shadowed(&self) -> Vec<Shadowed> {
        let shadowed = self.registry.ids().filter_map(|id| match self.registry.standing(id)? {
            Standing::Shadowed { by } => Some(Shadowed { record: id.to_string(), by: by.to_string() }),
            Standing::InForce | Standing::Rejected => None,
        });
        shadowed.take(LISTED_COMPLAINTS).collect()
    }

    fn workers_now(&self, health: &Health) -> Vec<Worker> {
        let beats = health.workers().map(|(_, beat)| beat.age());
        let hubs = self.steering.hubs().iter().zip(&self.workers).zip(beats);
        let each = hubs.enumerate().map(|(at, ((hub, worker), age))| {
            let engine = worker.stats().engine;
            Worker {
                hub: hub.number,
                device: hub.inner_name.clone(),
                heartbeat: age.map(|age| age.as_secs_f64()),
                load: self.loads.of(at),
                connections: engine.connections,
                guests: engine.ports,
                requests: self
                    .tallies
                    .get(at)
                    .map_or(0, |tally| tally.answers().map(|(.., count)| count).sum()),
            }
        });
        each.collect()
    }

    /// What has become of a port, and why.
    pub(super) fn port_state(&self, port: &PortName) -> (PortState, Option<&str>) {
        match self.told.get(port).map(String::as_str) {
            Some(ABSENT) => (PortState::Waiting, Some(ABSENT)),
            Some(reason) => (PortState::Error, Some(reason)),
            None if self.steering.is_attached(port) => {
                let by_classifier = self.steering.way_to(port) == Way::Classifier;
                (PortState::Attached, by_classifier.then_some(BY_CLASSIFIER))
            }
            None => (PortState::Waiting, Some("its turn has not come yet")),
        }
    }

    /// The program that steers a port.
    fn program_of(&self, port: &PortName) -> Option<String> {
        let by = self.steering.steered_by(port)?;
        Some(if by == By::Xdp { "xdp" } else { "tcx" }.into())
    }

    /// How many ports are in which state.
    pub(super) fn ports_by_state(&self) -> BTreeMap<PortState, u64> {
        let mut counts: BTreeMap<_, _> = PortState::ALL.map(|state| (state, 0)).into();
        for port in self.plan.ports() {
            *counts.entry(self.port_state(port).0).or_default() += 1;
        }
        counts.insert(PortState::Closed, self.closed().count() as u64);
        *counts.entry(PortState::Error).or_default() += self.left_open().count() as u64;
        counts
    }

    fn ports_now(&self, about: About) -> Ports {
        let (xdp, tcx) = self.steering.ports_by_program();
        let most = if about == About::EveryPort { usize::MAX } else { LISTED_PORTS };
        let mut ports = Ports {
            counts: self.ports_by_state(),
            programs: [("xdp".into(), xdp as u64), ("tcx".into(), tcx as u64)].into(),
            ..Ports::default()
        };
        let wanted = self.plan.ports().map(|port| (port, self.port_state(port)));
        let closed = self.closed().map(|port| (port, (PortState::Closed, None)));
        let left_open = self.left_open().map(|(port, reason)| (port, (PortState::Error, Some(reason))));
        for (port, (state, reason)) in wanted.chain(left_open).chain(closed) {
            if about == About::Trouble && matches!(state, PortState::Attached | PortState::Closed) {
                continue;
            }
            if ports.listed.len() == most {
                ports.unlisted += 1;
                continue;
            }
            ports.listed.push(Port {
                name: spoken(port),
                state,
                reason: reason.map(str::to_owned),
                program: self.program_of(port),
                way: way_of(port),
                identities: self.speakers(port).count() as u64,
            });
        }
        ports
    }

    /// How many records are in which state: of files, and of every source that has any.
    pub(super) fn instances(&self) -> Vec<Instances> {
        let none = InstanceState::ALL.map(|state| (state, 0));
        let mut counts = BTreeMap::from([(Source::File, none)]);
        for id in self.registry.ids() {
            let state = self.instance(id);
            let counts = counts.entry(id.source).or_insert(none);
            counts.iter_mut().filter(|(other, _)| *other == state).for_each(|(_, count)| *count += 1);
        }
        let of = |(source, counts): (Source, [_; InstanceState::ALL.len()])| {
            counts.map(|(state, count)| Instances { source: source.name().into(), state, count })
        };
        counts.into_iter().flat_map(of).collect()
    }

    pub(super) fn instance(&self, id: &RecordId) -> InstanceState {
        match self.registry.standing(id) {
            Some(Standing::InForce) => {}
            Some(Standing::Shadowed { .. }) => return InstanceState::Shadowed,
            Some(Standing::Rejected) | None => return InstanceState::Rejected,
        }
        let mut state = InstanceState::Unplaced;
        for (who, has) in self.plan.claims(id) {
            if !has {
                return InstanceState::Contested;
            }
            let served = self.guest_state(who) == GuestState::Served;
            state = match (served, state) {
                (true, InstanceState::Unplaced | InstanceState::Served) => InstanceState::Served,
                _ => InstanceState::Waiting,
            };
        }
        state
    }

    /// Counters that are 0 where all is well.
    fn troubling(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        match self.steering.counters() {
            Ok(kernel) => {
                let of = |wanted: Verdict| {
                    kernel.iter().find(|(verdict, _)| *verdict == wanted).map_or(0, |(_, frames)| frames)
                };
                for (name, verdict) in [
                    ("frames_over_limit", Verdict::DropOverLimit),
                    ("frames_without_hub", Verdict::DropNoHub),
                    ("frames_without_socket", Verdict::SocketDropAbsent),
                    ("frames_without_ring", Verdict::RingDropAbsent),
                    ("namespace_ring_full", Verdict::RingDropFull),
                    ("identity_mismatch", Verdict::DropUnknownMac),
                ] {
                    counts.insert(name.to_owned(), of(verdict));
                }
            }
            Err(error) => warn!("kernel counters: {error}"),
        }
        let errands = self.state.counts();
        let losses = self.steering.losses();
        counts.insert("refused_by_ports".into(), losses.ports);
        counts.insert("veth_full".into(), losses.hubs.iter().map(|hub| hub.veth_full).sum());
        let mut add = |name: &str, count: u64| *counts.entry(name.to_owned()).or_default() += count;
        for worker in &self.workers {
            let stats = worker.stats();
            add("ring_full", stats.socket.ring_full);
            add("send_lost", stats.tap.full + stats.tap.no_memory + stats.tap.down + stats.tap.other);
            add(
                "connections_refused",
                stats.engine.refused_connections + stats.engine.refused_port_connections,
            );
            add("guests_refused", stats.engine.refused_ports);
            add("faults", stats.engine.faults);
        }
        let expired = |tally: &Arc<Tally>| tally.ended(Reason::Record, End::Expired);
        add("requests_without_record", self.tallies.iter().map(expired).sum());
        let audit = self.audit.as_ref().map(|audit| audit.borrow().counts()).unwrap_or_default();
        add("audit_dropped", audit.queue_full + audit.write_failed);
        add("messages_dropped", errands.messages.dropped);
        add("state_errors", errands.mailboxes.loads_failed + errands.mailboxes.saves_failed);
        add("records_rejected", self.registry.refusals());
        counts
    }

    /// Everybody known by this name: a port, a MAC, the name or UUID of a VM, or a record; and how to hear what
    /// is held for each.
    #[must_use]
    pub(in crate::agent) fn guests(&self, name: &str) -> Vec<Asked> {
        let known = self.plan.everybody().filter(|(who, id)| self.is_called(name, who, *id));
        known.take(LISTED_GUESTS).map(|(who, id)| self.guest(who, id)).collect()
    }

    fn is_called(&self, name: &str, who: &IdentityName, id: Option<&RecordId>) -> bool {
        id.is_some_and(|id| self.is_vm(name, id))
            || who.port.ifname == name
            || spoken(&who.port) == name
            || who.mac.to_string().eq_ignore_ascii_case(name)
    }

    /// The identities of the VMs with this name or UUID, or with this record: [`LISTED_GUESTS`] at most.
    pub(super) fn identities_of_vm(&self, name: &str) -> Vec<&IdentityName> {
        let known = self.plan.everybody().filter(|(_, id)| id.is_some_and(|id| self.is_vm(name, id)));
        known.map(|(who, _)| who).take(LISTED_GUESTS).collect()
    }

    fn is_vm(&self, name: &str, id: &RecordId) -> bool {
        let record = self.records.get(id);
        record.is_some_and(|record| {
            record.vm.name.as_str() == name || record.vm.uuid.as_str().eq_ignore_ascii_case(name)
        }) || &*id.key == name
            || id.to_string() == name
    }

    /// What an identity's requests get.
    pub(super) fn guest_state(&self, who: &IdentityName) -> GuestState {
        match self.bound.get(who).map(|bound| &bound.serves) {
            Some(_) if self.steering.way_to(&who.port) == Way::None => GuestState::Unreachable,
            Some(Serves::Responses(_)) => GuestState::Served,
            Some(Serves::Awaited) => GuestState::Awaited,
            Some(Serves::Gone) => GuestState::Gone,
            None => GuestState::Unbound,
        }
    }

    fn guest(&self, who: &IdentityName, id: Option<&RecordId>) -> Asked {
        let record = id.and_then(|id| self.records.get(id));
        let bound = self.bound.get(who);
        let slot = bound.map(|bound| bound.slot);
        let guest = Guest {
            port: spoken(&who.port),
            mac: who.mac.to_string(),
            record: id.map(RecordId::to_string),
            vm: record.map(|record| record.vm.name.to_string()),
            uuid: record.map(|record| record.vm.uuid.as_str().to_owned()),
            state: self.guest_state(who),
            reason: self.port_state(&who.port).1.map(str::to_owned),
            slot,
            hub: slot.map(|slot| self.steering.hub_of(slot)),
            program: self.program_of(&who.port),
            way: way_of(&who.port),
            held: None,
        };
        let asked = slot.and_then(|slot| {
            let (reply, answer) = oneshot::channel();
            // Whoever asked may have gone away by then.
            self.worker(slot).ok()?.look(slot, |held| _ = reply.send(held)).ok()?;
            Some(answer)
        });
        (guest, asked)
    }
}

/// How guests reach a port.
fn way_of(port: &PortName) -> GuestWay {
    if inlet::is_inlet(port) { GuestWay::Inlet } else { GuestWay::Device }
}

/// A port as the command line names it.
pub(super) fn spoken(port: &PortName) -> String {
    match &port.netns {
        Some(netns) => format!("{}@{netns}", port.ifname),
        None => port.ifname.clone(),
    }
}
