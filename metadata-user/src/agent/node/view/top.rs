//! The VMs of the live view.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

use metadata_content::record::Record;
use metadata_control::status::{GuestState, LISTED_GUESTS};
use metadata_control::top::{BootStage, QUIET_AFTER, SeenRequest, Sort, TopQuery, VmPage, VmRow};
use metadata_datapath::stack::SlotStats;
use metadata_feed::registry::RecordId;
use metadata_serve::audit::follow::{FollowedGuest, FollowedRequest, Following};
use tokio::sync::oneshot;

use super::View;
use crate::agent::node::answers::Serves;
use crate::agent::node::spoken;
use crate::agent::slots::IdentityName;

/// A VM's page, and the channel for its worker's report on connections and requests; `None` if the VM is not bound.
pub(in crate::agent::node) type AskedPage = (VmPage, Option<oneshot::Receiver<SlotStats>>);

/// The listed VMs, and counts of all.
#[derive(Debug, Default)]
pub(in crate::agent::node) struct Listed {
    pub(in crate::agent::node) stages: BTreeMap<BootStage, u64>,
    pub(in crate::agent::node) vms: Vec<VmRow>,
    pub(in crate::agent::node) matching: u64,
}

/// What is known of an identity, before it is known whether it is listed.
struct Line<'a> {
    who: &'a IdentityName,
    record: Option<&'a Record>,
    seen: Option<&'a FollowedGuest>,
    stage: BootStage,
}

impl Line<'_> {
    fn name(&self) -> Option<&str> {
        self.record.map(|record| record.vm.name.as_str())
    }
}

impl<'a> View<'a> {
    /// The VMs that a query asks for.
    pub(in crate::agent::node) fn listed(
        self,
        query: &TopQuery,
        following: &Following,
        now: Instant,
    ) -> Listed {
        let mut listed = Listed::default();
        let filter = query.filter.to_lowercase();
        let mut lines = Vec::new();
        for (who, id) in self.catalogue.plan().all_identities() {
            let line = self.line(who, id, following, now);
            *listed.stages.entry(line.stage).or_default() += 1;
            if filter.is_empty() || self.matches(&line, &filter) {
                lines.push(line);
            }
        }
        listed.matching = lines.len() as u64;
        sort(&mut lines, query.sort);
        let page = lines.iter().skip(query.offset).take(query.most());
        listed.vms = page.map(|line| self.row(line, now)).collect();
        listed
    }

    /// The pages of the VMs with a name, [`LISTED_GUESTS`] at most.
    pub(in crate::agent::node) fn vm_pages(self, name: &str, following: &Following) -> Vec<AskedPage> {
        let now = Instant::now();
        let known = self.catalogue.plan().all_identities().filter(|(who, id)| self.is_called(name, who, *id));
        known.take(LISTED_GUESTS).map(|(who, id)| self.vm_page(who, id, following, now)).collect()
    }

    fn vm_page(
        self,
        who: &'a IdentityName,
        id: Option<&'a RecordId>,
        following: &Following,
        now: Instant,
    ) -> AskedPage {
        let line = self.line(who, id, following, now);
        let slot = self.ports.bindings().get(who).map(|(slot, _)| slot);
        let requests = line.seen.iter().flat_map(|seen| seen.lately.iter().rev());
        let page = VmPage {
            row: self.row(&line, now),
            record: id.map(RecordId::to_string),
            slot,
            hub: slot.map(|slot| self.ports.steering().hub_of(slot)),
            program: self.ports.program_of(&who.port),
            held: None,
            requests: requests.map(|request| seen_request(request, now)).collect(),
        };
        (page, self.ports.ask_held(who))
    }

    fn line<'b>(
        self,
        who: &'b IdentityName,
        id: Option<&RecordId>,
        following: &'b Following,
        now: Instant,
    ) -> Line<'b>
    where
        'a: 'b,
    {
        let record = id.and_then(|id| self.catalogue.record(id)).map(|record| &**record);
        let slot = self.ports.bindings().get(who).map(|(slot, _)| slot);
        let uuid = record.map(|record| record.vm.uuid.as_str());
        // The slot may have had another guest.
        let is_its =
            |seen: &&FollowedGuest| seen.vm.is_none() || uuid.is_none() || seen.vm.as_deref() == uuid;
        let seen = slot.and_then(|slot| following.guest(slot)).filter(is_its);
        let stage = match (self.ports.guest_state(who), seen) {
            (GuestState::Unbound | GuestState::Unreachable, _) => BootStage::Unattached,
            (GuestState::Awaited, _) => BootStage::Unrecorded,
            (GuestState::Gone, _) => BootStage::Gone,
            (GuestState::Served, None) => BootStage::Silent,
            (GuestState::Served, Some(seen)) if since(seen.last, now) < QUIET_AFTER => BootStage::Asking,
            (GuestState::Served, Some(_)) => BootStage::Quiet,
        };
        Line { who, record, seen, stage }
    }

    /// The dialect that answered the guest, or those that it asked before it was followed.
    fn dialect(self, line: &Line<'_>) -> Option<String> {
        if let Some(found) = line.seen.and_then(|seen| seen.dialect) {
            return Some(found.label().to_owned());
        }
        let (_, serves) = self.ports.bindings().get(line.who)?;
        let Serves::Responses(responses) = serves else { return None };
        let asked: Vec<_> = responses.vm().mailbox.asked().iter().map(|dialect| dialect.as_str()).collect();
        (!asked.is_empty()).then(|| asked.join(","))
    }

    fn matches(self, line: &Line<'_>, filter: &str) -> bool {
        let has = |text: &str| text.to_lowercase().contains(filter);
        line.name().is_some_and(has)
            || line.record.is_some_and(|record| has(record.vm.uuid.as_str()))
            || has(&spoken(&line.who.port))
            || has(&line.who.mac.to_string())
            || has(line.stage.name())
            || self.dialect(line).is_some_and(|dialect| has(&dialect))
    }

    fn row(self, line: &Line<'_>, now: Instant) -> VmRow {
        let Line { who, record, seen, stage } = line;
        let request = seen.and_then(|seen| seen.lately.back());
        VmRow {
            vm: record.map(|record| record.vm.name.to_string()),
            uuid: record.map(|record| record.vm.uuid.as_str().to_owned()),
            port: spoken(&who.port),
            mac: who.mac.to_string(),
            stage: *stage,
            waits_for: self.waits_for(line),
            dialect: self.dialect(line),
            first: seen.map(|seen| since(seen.first, now)),
            last: seen.map(|seen| since(seen.last, now)),
            requests: seen.map_or(0, |seen| seen.requests),
            failed: seen.map_or(0, |seen| seen.failed),
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

/// Sorts lines; equal ones by name and then by port.
fn sort(lines: &mut [Line<'_>], order: Sort) {
    lines.sort_by(|one, other| (one.name(), one.who).cmp(&(other.name(), other.who)));
    match order {
        Sort::Name => {}
        Sort::Newest => {
            lines.sort_by_key(|line| (Reverse(line.seen.map(|seen| seen.first)), line.stage));
        }
        Sort::Requests => lines.sort_by_key(|line| Reverse(line.seen.map(|seen| seen.requests))),
        Sort::Failed => lines.sort_by_key(|line| Reverse(line.seen.map(|seen| seen.failed))),
        Sort::Stage => lines.sort_by_key(|line| line.stage),
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
