//! Requests that only one VM has sent so far. Once a second VM sends the same bytes, a request is learned.

use metadata_common::maps::Slot;
use metadata_common::share::Tenant;
use std::collections::{HashMap, VecDeque};

use crate::service::ReportedRequest;

/// Limit on candidates. The oldest of the tenant that has most of them makes room for another, so a guest that sends ever
/// new requests displaces its own.
pub(crate) const CANDIDATES: usize = 1_024;

/// The candidates of all tenants.
#[derive(Default)]
pub(super) struct CandidateRequests {
    /// The requests of each tenant, the oldest first.
    of: HashMap<Tenant, VecDeque<ReportedRequest>>,
    /// The tenant of each request, by the request's hash.
    tenants: HashMap<u64, Tenant>,
}

impl CandidateRequests {
    /// Adds a request of a VM of this tenant. Returns the slot that has sent it before, if that is another one; then it is
    /// no candidate any more.
    pub(super) fn add(&mut self, tenant: &Tenant, report: &ReportedRequest) -> Option<Slot> {
        let hash = report.form.hash;
        if let Some(first) = self.tenants.get(&hash).cloned() {
            let requests = self.of.get_mut(&first)?;
            let at = requests.iter().position(|known| known.form.hash == hash)?;
            if requests[at].slot == report.slot {
                return None;
            }
            let known = requests.remove(at);
            self.forget(hash, &first);
            return known.map(|known| known.slot);
        }
        if self.tenants.len() >= CANDIDATES {
            self.make_room();
        }
        self.tenants.insert(hash, tenant.clone());
        self.of.entry(tenant.clone()).or_default().push_back(report.clone());
        None
    }

    fn make_room(&mut self) {
        let most = self.of.iter().max_by_key(|(_, requests)| requests.len());
        let Some(tenant) = most.map(|(tenant, _)| tenant.clone()) else { return };
        let oldest = self.of.get_mut(&tenant).and_then(VecDeque::pop_front);
        if let Some(oldest) = oldest {
            self.forget(oldest.form.hash, &tenant);
        }
    }

    fn forget(&mut self, hash: u64, tenant: &Tenant) {
        self.tenants.remove(&hash);
        if self.of.get(tenant).is_some_and(VecDeque::is_empty) {
            self.of.remove(tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CANDIDATES, CandidateRequests};
    use crate::service::ReportedRequest;
    use metadata_common::cookie::CookieKey;
    use metadata_common::maps::Slot;
    use metadata_common::share::Tenant;

    fn request(slot: Slot, path: &str) -> ReportedRequest {
        let text = format!("GET /{path} HTTP/1.1\r\nHost: a\r\n\r\n");
        ReportedRequest::of(slot, text.as_bytes(), &CookieKey([1, 2])).expect("a form")
    }

    #[test]
    fn a_second_vm_takes_a_candidate_and_the_same_vm_does_not() {
        let (mut candidates, tenant) = (CandidateRequests::default(), Tenant::namespace("shop"));
        for (slot, taken) in [(1, None), (1, None), (2, Some(1)), (3, None)] {
            assert_eq!(candidates.add(&tenant, &request(slot, "a")), taken, "slot {slot}");
        }
    }

    #[test]
    fn a_tenant_that_sends_ever_new_requests_displaces_its_own() {
        let mut candidates = CandidateRequests::default();
        let (modest, hostile) = (Tenant::namespace("modest"), Tenant::namespace("hostile"));
        candidates.add(&modest, &request(1, "meta-data"));
        for number in 0..2 * CANDIDATES {
            candidates.add(&hostile, &request(2, &number.to_string()));
        }
        assert_eq!(candidates.tenants.len(), CANDIDATES);
        assert_eq!(candidates.add(&modest, &request(3, "meta-data")), Some(1));
        assert_eq!(candidates.of.get(&modest).map(|requests| requests.len()), None, "nothing is left of it");
    }
}
