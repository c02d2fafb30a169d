//! The requests that the kernel answers, which several VMs have sent, and those that only one VM has sent so far. Once
//! a second VM sends the same bytes, a request is learned.

use metadata_common::mac::Mac;
use metadata_common::maps::Slot;
use metadata_common::share::{FairShare, Tenant};
use metadata_content::token::TOKEN_CHARS;
use metadata_feed::state::learned_requests::{self, SavedRequest};
use metadata_feed::state::save_queue::{SaveQueue, StateFile};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::warn;

use super::common::CommonAnswer;
use crate::service::{ReportedRequest, RequestForm, RequestReports};

/// Limit on learned requests. The one with the fewest recent answers makes room for another.
pub(super) const LEARNED: usize = 256;

/// Learned requests that each tenant may have while [`LEARNED`] is not reached.
const LEARNED_FLOOR: usize = 16;

/// How long a learned request is kept, whatever other requests come.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// A request whose answers are published.
pub(super) struct LearnedRequest {
    pub(super) form: Arc<RequestForm>,
    /// The tenant of the second VM that sent it. It counts towards this tenant's share.
    tenant: Tenant,
    since: Instant,
    /// Its place among all that were learned.
    number: u64,
    /// Answers by the kernel, of which older ones count less.
    recent: u64,
    pub(super) common: CommonAnswer,
}

impl LearnedRequest {
    /// Counts answers by the kernel.
    pub(super) fn answered(&mut self, more: u64) {
        self.recent = self.recent - self.recent / 16 + more;
    }
}

/// The file of learned requests, which the next agent reads.
pub(crate) struct LearnedFile {
    path: PathBuf,
    saves: SaveQueue,
}

impl LearnedFile {
    pub(crate) fn new(path: PathBuf, saves: SaveQueue) -> Self {
        Self { path, saves }
    }

    fn read(&self) -> Vec<SavedRequest> {
        learned_requests::read(&self.path).unwrap_or_else(|error| {
            warn!(file = %self.path.display(), "cannot read the requests that the kernel answered before: {error}; \
                workers answer them until guests have sent them again");
            Vec::new()
        })
    }
}

/// All learned requests.
pub(super) struct LearnedRequests {
    of: HashMap<u64, LearnedRequest>,
    /// The forms of `of` by number.
    forms: BTreeMap<u64, Arc<RequestForm>>,
    /// Increases with each learned request.
    count: u64,
    /// The learned requests of each tenant.
    shares: FairShare,
    reports: Arc<RequestReports>,
    file: Option<LearnedFile>,
    /// The count when the file was written.
    saved: u64,
}

impl LearnedRequests {
    /// Starts with what the previous agent has learned.
    pub(super) fn new(reports: Arc<RequestReports>, file: Option<LearnedFile>) -> Self {
        let saved = file.as_ref().map(LearnedFile::read).unwrap_or_default();
        let shares = FairShare::new(LEARNED, LEARNED_FLOOR);
        let (of, forms) = (HashMap::new(), BTreeMap::new());
        let mut learned = Self { of, forms, count: 0, shares, reports, file, saved: 0 };
        for SavedRequest { tenant, request } in saved {
            if let Some(form) = learned.reports.form_of(request.as_bytes()) {
                learned.learn(form, &tenant);
            }
        }
        learned.saved = learned.count;
        learned
    }

    /// How many were learned since the start. Each has a number up to this.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    pub(super) fn contains(&self, request: u64) -> bool {
        self.of.contains_key(&request)
    }

    pub(super) fn get_mut(&mut self, request: u64) -> Option<&mut LearnedRequest> {
        self.of.get_mut(&request)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut LearnedRequest> {
        self.of.values_mut()
    }

    /// The forms that were learned after the one of this number.
    pub(super) fn forms_after(&self, number: u64) -> Vec<Arc<RequestForm>> {
        self.forms.range(number + 1..).map(|(_, form)| Arc::clone(form)).collect()
    }

    pub(super) fn is_full(&self) -> bool {
        self.of.len() >= LEARNED
    }

    /// Learns a request, unless it is known, or the tenant has its share, or all are [full](Self::is_full).
    pub(super) fn learn(&mut self, form: Arc<RequestForm>, tenant: &Tenant) -> bool {
        if self.is_full() || self.contains(form.hash) || self.shares.admit(tenant, 1).is_err() {
            return false;
        }
        self.count += 1;
        let (since, number, common) = (Instant::now(), self.count, CommonAnswer::default());
        self.reports.is_learned(&form);
        self.forms.insert(number, Arc::clone(&form));
        let tenant = tenant.clone();
        self.of.insert(form.hash, LearnedRequest { form, tenant, since, number, recent: 0, common });
        true
    }

    /// Forgets the request with the fewest recent answers, unless all are young.
    pub(super) fn forget_least(&mut self) -> Option<LearnedRequest> {
        let old = self.of.values().filter(|learned| learned.since.elapsed() > KEPT_FOR);
        let least = old.min_by_key(|learned| learned.recent).map(|learned| learned.form.hash)?;
        let forgotten = self.of.remove(&least)?;
        self.shares.release(&forgotten.tenant, 1);
        self.forms.remove(&forgotten.number);
        self.reports.is_forgotten(least);
        Some(forgotten)
    }

    /// Queues a write of the file if a request was learned since the last one.
    pub(super) fn save(&mut self) {
        let Some(LearnedFile { path, saves }) = self.file.as_ref().filter(|_| self.saved != self.count)
        else {
            return;
        };
        self.saved = self.count;
        let requests: Vec<_> =
            self.of.values().map(|learned| (learned.tenant.clone(), Arc::clone(&learned.form))).collect();
        let path = path.clone();
        saves.submit(StateFile::Requests, move || {
            learned_requests::write(&path, requests.iter().filter_map(|(tenant, form)| saved(tenant, form)))
        });
    }
}

/// A request as it is written; `None` for one that is no text.
fn saved(tenant: &Tenant, form: &RequestForm) -> Option<SavedRequest> {
    // The next agent finds where the token stands.
    let request = form.with_token(&form.request_of(Mac([0; 6])), &"-".repeat(TOKEN_CHARS));
    let request = String::from_utf8(Cow::into_owned(request)).ok()?;
    Some(SavedRequest { tenant: tenant.clone(), request })
}

// Candidates: requests that only one VM has sent so far.

/// Limit on candidates. The oldest of the tenant that has most of them makes room for another, so a guest that sends
/// ever new requests displaces its own.
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
    /// Adds a request of a VM of this tenant. Returns the slot that has sent it before, if that is another one; then it
    /// is no candidate any more.
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
    use super::{CANDIDATES, CandidateRequests, LEARNED, LEARNED_FLOOR, LearnedFile, LearnedRequests};
    use crate::service::{ReportedRequest, RequestReports};
    use metadata_common::maps::Slot;
    use metadata_common::share::Tenant;
    use metadata_common::siphash::SipKey;
    use metadata_feed::state::save_queue::SaveQueue;
    use std::sync::Arc;

    fn reports(key: u64) -> Arc<RequestReports> {
        Arc::new(RequestReports::new(SipKey([key, 2])))
    }

    fn request(path: &str) -> String {
        format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")
    }

    #[test]
    fn the_next_agent_starts_with_what_was_learned() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, saves) = (directory.path().join("requests"), SaveQueue::default());
        let file = || Some(LearnedFile::new(path.clone(), saves.clone()));
        let mac = "/latest/meta-data/network/interfaces/macs/52:54:00:00:00:01/mac";
        let mut first = LearnedRequests::new(reports(1), file());
        for path in ["/v1/meta-data", mac] {
            let form = first.reports.form_of(request(path).as_bytes()).expect("a form");
            assert!(first.learn(form, &Tenant::namespace("shop")));
        }
        first.save();
        saves.flush();
        // Another agent has another key.
        let next = LearnedRequests::new(reports(2), file());
        for path in ["/v1/meta-data", mac] {
            let form = next.reports.form_of(request(path).as_bytes()).expect("a form");
            assert!(next.contains(form.hash), "{path}");
        }
        assert_eq!((next.len(), next.saved), (2, 2), "and has nothing to write");
    }

    #[test]
    fn requests_with_other_fields_or_methods_are_not_restored() {
        let reports = reports(1);
        for request in
            ["POST /a HTTP/1.1\r\nHost: a\r\n\r\n", "GET /a HTTP/1.1\r\nHost: a\r\nCookie: b\r\n\r\n", "GET"]
        {
            assert!(reports.form_of(request.as_bytes()).is_none(), "{request}");
        }
    }

    #[test]
    fn a_tenant_has_its_share_of_the_learned_requests() {
        let mut learned = LearnedRequests::new(reports(1), None);
        let mut learn = |tenant: &str, path: String| {
            let form = learned.reports.form_of(request(&path).as_bytes()).expect("a form");
            learned.learn(form, &Tenant::namespace(tenant))
        };
        let hostile = (0..2 * LEARNED).filter(|number| learn("hostile", format!("/{number}"))).count();
        let modest = (0..LEARNED_FLOOR).filter(|number| learn("modest", format!("/m{number}"))).count();
        assert!(hostile < LEARNED && modest > 0, "{hostile} and {modest}");
    }

    fn report(slot: Slot, path: &str) -> ReportedRequest {
        let text = format!("GET /{path} HTTP/1.1\r\nHost: a\r\n\r\n");
        ReportedRequest::of(slot, text.as_bytes(), &SipKey([1, 2])).expect("a form")
    }

    #[test]
    fn a_second_vm_takes_a_candidate_and_the_same_vm_does_not() {
        let (mut candidates, tenant) = (CandidateRequests::default(), Tenant::namespace("shop"));
        for (slot, taken) in [(1, None), (1, None), (2, Some(1)), (3, None)] {
            assert_eq!(candidates.add(&tenant, &report(slot, "a")), taken, "slot {slot}");
        }
    }

    #[test]
    fn a_tenant_that_sends_ever_new_requests_displaces_its_own() {
        let mut candidates = CandidateRequests::default();
        let (modest, hostile) = (Tenant::namespace("modest"), Tenant::namespace("hostile"));
        candidates.add(&modest, &report(1, "meta-data"));
        for number in 0..2 * CANDIDATES {
            candidates.add(&hostile, &report(2, &number.to_string()));
        }
        assert_eq!(candidates.tenants.len(), CANDIDATES);
        assert_eq!(candidates.add(&modest, &report(3, "meta-data")), Some(1));
        assert_eq!(candidates.of.get(&modest).map(|requests| requests.len()), None, "nothing is left of it");
    }
}
