//! The VMs of the live view.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Instant;

use crate::service::audit::collect::{FollowedGuest, FollowedGuests, FollowedRequest};
use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::port::PortName;
use metadata_content::record::Record;
use metadata_control::order::NaturalName;
use metadata_control::status::{GuestState, LISTED_GUESTS, PortState};
use metadata_control::top::{BootStage, QUIET_AFTER, SeenRequest, TopQuery, VmOrder, VmPage, VmRow};
use metadata_datapath::stack::SlotStats;
use metadata_feed::registry::RecordId;
use tokio::sync::oneshot;

use super::NodeView;
use crate::agent::node::answers::SlotContent;
use crate::agent::node::port_text;
use crate::agent::slots::IdentityName;

/// A VM's page, and the channel for its worker's report on connections and requests; `None` if the VM is not bound.
pub(crate) type VmReport = (VmPage, Option<oneshot::Receiver<SlotStats>>);

/// The listed VMs, and counts of all.
#[derive(Debug, Default)]
pub(crate) struct VmListing {
    pub(crate) stages: BTreeMap<BootStage, u64>,
    pub(crate) vms: Vec<VmRow>,
    pub(crate) matching: u64,
}

/// What is known of an identity, before it is known whether it is listed. A node has thousands of them, and a viewer
/// asks each second, so this is what the order and the counts need; the rest is looked up for the listed ones.
struct Line<'a> {
    who: &'a IdentityName,
    id: Option<&'a RecordId>,
    bound: Option<(Slot, &'a SlotContent)>,
    seen: Option<&'a FollowedGuest>,
    stage: BootStage,
    /// Its port cannot be attached, although it has an interface.
    port_error: bool,
}

impl<'a> Line<'a> {
    /// Its place among those that are equal otherwise.
    fn place(&self) -> (NaturalName<'a>, Option<NaturalName<'a>>, Mac) {
        let IdentityName { port: PortName { ifname, netns }, mac } = self.who;
        (NaturalName(ifname), netns.as_deref().map(NaturalName), *mac)
    }

    /// When its last boot began to ask.
    fn boot(&self) -> Option<Instant> {
        self.seen.map(|seen| seen.boot)
    }

    /// Its place among stages: what waits for an operator first, what is off last.
    fn rank(&self) -> u8 {
        match self.stage {
            BootStage::Unattached if self.port_error => 0,
            BootStage::Unrecorded => 1,
            BootStage::Asking => 2,
            BootStage::Quiet => 3,
            BootStage::Silent => 4,
            BootStage::Unattached => 5,
            BootStage::Gone => 6,
        }
    }

    /// Its place in an order; equal ones are in the order of ports.
    fn compare(&self, other: &Self, sort: VmOrder) -> Ordering {
        let order = match sort {
            VmOrder::Newest => {
                let held = other.is_held().cmp(&self.is_held());
                held.then_with(|| other.boot().cmp(&self.boot())).then(self.rank().cmp(&other.rank()))
            }
            VmOrder::Requests => other.requests().cmp(&self.requests()),
            VmOrder::Failed => other.failed().cmp(&self.failed()),
            VmOrder::Stage => self.rank().cmp(&other.rank()),
            VmOrder::Name => Ordering::Equal,
        };
        order.then_with(|| self.place().cmp(&other.place()))
    }

    /// It waits, and so has not been seen to ask.
    fn is_held(&self) -> bool {
        self.rank() < 2
    }

    fn requests(&self) -> u64 {
        self.seen.map_or(0, |seen| seen.requests)
    }

    fn failed(&self) -> u64 {
        self.seen.map_or(0, |seen| seen.failed)
    }
}

impl<'a> NodeView<'a> {
    /// The VMs that a query asks for.
    pub(crate) fn listed(self, query: &TopQuery, following: &'a FollowedGuests, now: Instant) -> VmListing {
        let mut listed = VmListing::default();
        let filter = query.filter.to_lowercase();
        let mut lines = Vec::new();
        // Both are in the order of identities, so that no look-up is needed.
        let mut bound = self.ports.bindings().all_served().peekable();
        for (who, id) in self.catalogue.plan().all_identities() {
            while bound.next_if(|(other, _)| *other < who).is_some() {}
            let bound = bound.next_if(|(other, _)| *other == who).map(|(_, bound)| bound);
            let line = self.line(who, id, bound, following, now);
            *listed.stages.entry(line.stage).or_default() += 1;
            if filter.is_empty() || self.matches(&line, &filter) {
                lines.push(line);
            }
        }
        listed.matching = lines.len() as u64;
        self.cut(&mut lines, query);
        listed.vms = lines.iter().map(|line| self.row(line, now)).collect();
        listed
    }

    /// Leaves the lines that a query lists, in its order; equal ones in the order of ports.
    fn cut(self, lines: &mut Vec<Line<'a>>, query: &TopQuery) {
        let most = query.most();
        if query.sort == VmOrder::Name {
            // A name is looked up once for each line, and not in each comparison.
            let name = |line: &Line<'a>| self.record(line).map(|record| NaturalName(record.vm.name.as_str()));
            lines.sort_by_cached_key(|line| (name(line), line.place()));
            return lines.truncate(most);
        }
        let compare = |one: &Line<'a>, other: &Line<'a>| one.compare(other, query.sort);
        if most < lines.len() {
            lines.select_nth_unstable_by(most, compare);
            lines.truncate(most);
        }
        lines.sort_unstable_by(compare);
    }

    fn record(self, line: &Line<'a>) -> Option<&'a Record> {
        self.catalogue.record(line.id?).map(|record| &**record)
    }

    /// The pages of the VMs with a name, [`LISTED_GUESTS`] at most.
    pub(crate) fn vm_pages(self, name: &str, following: &'a FollowedGuests) -> Vec<VmReport> {
        let now = Instant::now();
        let known = self.called(name).map(|(who, id)| self.vm_page(who, id, following, now));
        let unserved = self.unserved(name).into_iter().map(|nic| (nic.page(), None));
        known.chain(unserved).take(LISTED_GUESTS).collect()
    }

    fn vm_page(
        self,
        who: &'a IdentityName,
        id: Option<&'a RecordId>,
        following: &'a FollowedGuests,
        now: Instant,
    ) -> VmReport {
        let bound = self.ports.bindings().get(who);
        let line = self.line(who, id, bound, following, now);
        let slot = bound.map(|(slot, _)| slot);
        let requests = line.seen.iter().flat_map(|seen| seen.lately.iter().rev());
        let page = VmPage {
            row: self.row(&line, now),
            record: id.map(RecordId::to_string),
            slot,
            hub: slot.map(|slot| self.ports.steering().hubs().hub_of(slot)),
            program: self.ports.program_of(&who.port),
            held: None,
            events: self.pending_events(id),
            requests: requests.map(|request| seen_request(request, now)).collect(),
        };
        (page, self.ports.ask_held(who))
    }

    fn line(
        self,
        who: &'a IdentityName,
        id: Option<&'a RecordId>,
        bound: Option<(Slot, &'a SlotContent)>,
        following: &'a FollowedGuests,
        now: Instant,
    ) -> Line<'a> {
        let serves = bound.map(|(_, serves)| serves);
        let owner = match serves {
            Some(SlotContent::Responses(responses)) => Some(&*responses.vm().owner),
            _ => None,
        };
        // The slot may have had another guest.
        let is_its =
            |seen: &&FollowedGuest| seen.vm.is_none() || owner.is_none() || seen.vm.as_deref() == owner;
        let seen = bound.and_then(|(slot, _)| following.guest(slot)).filter(is_its);
        let stage = match (self.ports.state_when(&who.port, serves), seen) {
            (GuestState::Unbound | GuestState::Unreachable | GuestState::Unserved, _) => {
                BootStage::Unattached
            }
            (GuestState::Awaited, _) => BootStage::Unrecorded,
            (GuestState::Gone, _) => BootStage::Gone,
            (GuestState::Served, None) => BootStage::Silent,
            (GuestState::Served, Some(seen)) if since(seen.last, now) < QUIET_AFTER => BootStage::Asking,
            (GuestState::Served, Some(_)) => BootStage::Quiet,
        };
        let port_error =
            stage == BootStage::Unattached && self.ports.state_of(&who.port).0 == PortState::Error;
        Line { who, id, bound, seen, stage, port_error }
    }

    /// The dialect that answered the guest, or those that it asked before it was followed.
    fn dialect(self, line: &Line<'_>) -> Option<String> {
        if let Some(found) = line.seen.and_then(|seen| seen.dialect) {
            return Some(found.label().to_owned());
        }
        let (_, SlotContent::Responses(responses)) = line.bound? else { return None };
        let asked: Vec<_> = responses.vm().mailbox.asked().iter().map(|dialect| dialect.as_str()).collect();
        (!asked.is_empty()).then(|| asked.join(","))
    }

    fn matches(self, line: &Line<'a>, filter: &str) -> bool {
        let IdentityName { port, mac } = line.who;
        let vm = self.record(line).map(|record| &record.vm);
        let (name, uuid) = vm.map_or(("", ""), |vm| (vm.name.as_str(), vm.uuid.as_str()));
        let (port, dialect) = (port_text(port), self.dialect(line).unwrap_or_default());
        let stage = line.stage.name();
        format!("{name}\n{uuid}\n{port}\n{mac}\n{stage}\n{dialect}").to_lowercase().contains(filter)
    }

    fn row(self, line: &Line<'a>, now: Instant) -> VmRow {
        let Line { who, seen, stage, .. } = line;
        let record = self.record(line);
        let request = seen.and_then(|seen| seen.lately.back());
        VmRow {
            vm: record.map(|record| record.vm.name.to_string()),
            uuid: record.map(|record| record.vm.uuid.as_str().to_owned()),
            port: port_text(&who.port),
            mac: who.mac.to_string(),
            stage: *stage,
            waits_for: self.waits_for(line),
            port_error: line.port_error,
            dialect: self.dialect(line),
            first: seen.map(|seen| since(seen.first, now)),
            boot: seen.map(|seen| since(seen.boot, now)),
            last: seen.map(|seen| since(seen.last, now)),
            requests: line.requests(),
            failed: line.failed(),
            has_user_data: seen.is_some_and(|seen| seen.has_user_data),
            path: request.map(|request| request.path.to_string()),
            status: request.map(|request| request.status),
        }
    }

    fn waits_for(self, line: &Line<'_>) -> Option<String> {
        let last = line.seen.and_then(|seen| seen.lately.back()).map(|request| request.status);
        match line.stage {
            BootStage::Unattached => {
                let reason = self.ports.state_of(&line.who.port).1;
                Some(reason.unwrap_or("its port is not attached yet").to_owned())
            }
            BootStage::Unrecorded => Some("its record".into()),
            BootStage::Asking if last == Some(429) => Some("its request rate".into()),
            BootStage::Asking | BootStage::Quiet | BootStage::Silent | BootStage::Gone => None,
        }
    }
}

fn seen_request(request: &FollowedRequest, now: Instant) -> SeenRequest {
    SeenRequest {
        ago: since(request.at, now),
        method: request.method.to_owned(),
        path: request.path.to_string(),
        dialect: request.dialect.label().to_owned(),
        status: request.status,
        bytes: request.bytes,
        us: u64::try_from(request.took.as_micros()).unwrap_or(u64::MAX),
    }
}

fn since(then: Instant, now: Instant) -> f64 {
    now.saturating_duration_since(then).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::time::{Duration, Instant};

    use crate::service::audit::collect::FollowedGuest;
    use metadata_common::port::PortName;
    use metadata_control::top::{BootStage, VmOrder};

    use super::Line;
    use crate::agent::slots::IdentityName;

    #[test]
    fn lines_that_are_equal_otherwise_are_in_the_order_of_ports_for_people() {
        let names = ["vx10", "vx2", "vx1"].map(|port| IdentityName {
            port: PortName::local(port),
            mac: "52:54:00:00:00:01".parse().expect("a MAC"),
        });
        let (id, bound, seen, stage, port_error) = (None, None, None, BootStage::Silent, false);
        for sort in VmOrder::ALL {
            let mut lines =
                Vec::from(names.each_ref().map(|who| Line { who, id, bound, seen, stage, port_error }));
            lines.sort_unstable_by(|one, other| one.compare(other, sort));
            let ports: Vec<_> = lines.iter().map(|line| line.who.port.ifname.as_str()).collect();
            assert_eq!(ports, ["vx1", "vx2", "vx10"], "{}", sort.name());
        }
    }

    #[test]
    fn those_that_boot_come_before_thousands_that_are_idle_or_off() {
        let (start, idle) = (Instant::now(), 2_000);
        let after = |seconds| start + Duration::from_secs(seconds);
        // Each has asked since the viewer came: the first request long ago, and its last boot at a time.
        let seen = |boot| FollowedGuest {
            vm: None,
            first: start,
            boot: after(boot),
            last: after(900),
            requests: 1,
            failed: 0,
            dialect: None,
            has_user_data: false,
            lately: VecDeque::new(),
        };
        let (old, new, rebooted) = (seen(5), seen(880), seen(890));
        let name = |number: u32| IdentityName {
            port: PortName::local(&*format!("tap{number:04}")),
            mac: "52:54:00:00:00:01".parse().expect("a MAC"),
        };
        let mut kinds = [
            (BootStage::Silent, None, false, idle),
            (BootStage::Unattached, None, false, idle),
            (BootStage::Quiet, Some(&old), false, idle),
            (BootStage::Gone, None, false, 1),
            (BootStage::Asking, Some(&new), false, 1),
            (BootStage::Asking, Some(&rebooted), false, 1),
            (BootStage::Unrecorded, None, false, 1),
            (BootStage::Unattached, None, true, 1),
        ];
        for _ in 0..2 {
            let numbered = kinds.iter().flat_map(|kind| (0..kind.3).map(move |_| kind)).zip(0..);
            let names: Vec<_> = numbered.map(|(kind, number)| (kind, name(number))).collect();
            let mut lines: Vec<_> = names
                .iter()
                .map(|(kind, who)| {
                    let &&(stage, seen, port_error, _) = kind;
                    Line { who, id: None, bound: None, seen, stage, port_error }
                })
                .collect();
            lines.sort_unstable_by(|one, other| one.compare(other, VmOrder::Newest));
            let first: Vec<_> = lines.iter().take(5).map(|line| (line.stage, line.boot())).collect();
            assert_eq!(
                first,
                [
                    (BootStage::Unattached, None),
                    (BootStage::Unrecorded, None),
                    (BootStage::Asking, Some(after(890))),
                    (BootStage::Asking, Some(after(880))),
                    (BootStage::Quiet, Some(after(5))),
                ]
            );
            lines.sort_unstable_by(|one, other| one.compare(other, VmOrder::Stage));
            let mut stages: Vec<_> = lines.iter().map(|line| line.stage).collect();
            stages.dedup();
            assert_eq!(
                stages,
                [
                    BootStage::Unattached,
                    BootStage::Unrecorded,
                    BootStage::Asking,
                    BootStage::Quiet,
                    BootStage::Silent,
                    BootStage::Unattached,
                    BootStage::Gone,
                ]
            );
            kinds.reverse();
        }
    }
}
