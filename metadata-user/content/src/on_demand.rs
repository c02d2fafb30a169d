//! A store whose responses are rendered when guests ask for them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use metadata_common::addresses::Connection;
use metadata_common::maps::Slot;
use metadata_common::time::Now;

use crate::dialect;
use crate::http::{Request, Response};
use crate::record::Dialects;
use crate::store::{Datasource, Host, Interner, LiveOutcome, ParkedCall, Responses, SlotState, Store};

/// A [`Store`] that renders a dialect when its guest first asks for it. Rendering takes 20 to 90
/// µs for each dialect and VM.
#[derive(Debug)]
pub struct OnDemand {
    store: Store,
    interner: Mutex<Interner>,
}

impl OnDemand {
    /// Takes a store, to which the caller publishes through [`store`](Self::store).
    #[must_use]
    pub fn new(store: Store) -> Self {
        Self { store, interner: Mutex::new(Interner::new()) }
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the state of `slot`. Responses contain every route that may answer a request for `path`, which is
    /// normalised. Never waits.
    #[must_use]
    pub fn get(&self, slot: Slot, host: Host, path: &str) -> SlotState {
        let entry = self.store.get(slot);
        let SlotState::Ready(responses) = entry else { return entry };
        let missing = dialect::missing(&responses, host, path);
        SlotState::Ready(self.render(slot, responses, missing))
    }

    /// Answers a request of a slot by the responses that [`Store::get`] returned. Also returns the dialect of the
    /// route, and the responses that contain it.
    #[must_use]
    pub fn answer_with(
        &self,
        responses: Arc<Responses>,
        now: Now,
        connection: &Connection,
        request: &Request<'_>,
        parked: Option<&ParkedCall>,
    ) -> (LiveOutcome, Datasource, Arc<Responses>) {
        if let Some((outcome, datasource)) = responses.answer_if_rendered(now, connection, request, parked) {
            return (outcome, datasource, responses);
        }
        let missing = dialect::missing(&responses, Host::at(connection.local), request.target.path);
        let responses = self.render(connection.slot, responses, missing);
        let (outcome, datasource) = responses.answer_of(now, connection, request, parked);
        (outcome, datasource, responses)
    }

    /// Returns the answer to a request and the dialect that gives it, if the record and the request alone decide them.
    /// `None` if anything else does, or if a dialect that is not rendered might answer.
    #[must_use]
    pub fn lasting_answer(
        responses: &Responses,
        connection: &Connection,
        request: &Request<'_>,
        now_unix: u64,
    ) -> Option<(Response, Datasource)> {
        let missing = dialect::missing(responses, Host::at(connection.local), request.target.path);
        if !missing.is_empty() || !responses.is_lasting(connection, request) {
            return None;
        }
        // No lasting answer depends on the time, but a session token in the request does.
        let now = Now { mono: Duration::ZERO, unix_seconds: now_unix };
        match responses.answer_of(now, connection, request, None) {
            (LiveOutcome::Ready(response), datasource) => Some((response, datasource)),
            (LiveOutcome::Changed(_) | LiveOutcome::Park(_), _) => None,
        }
    }

    /// The responses of a slot, with these dialects of its record rendered as well.
    fn render(&self, slot: Slot, old: Arc<Responses>, missing: Dialects) -> Arc<Responses> {
        if missing.is_empty() { old } else { self.render_more(slot, old, missing) }
    }

    #[cold]
    fn render_more(&self, slot: Slot, old: Arc<Responses>, missing: Dialects) -> Arc<Responses> {
        let more = match self.interner.try_lock() {
            Ok(mut interner) => dialect::render_more(&old, &mut interner, missing),
            // Another thread renders or sweeps. This guest's answers share less memory with those of others.
            Err(_) => dialect::render_more(&old, &mut Interner::new(), missing),
        };
        let Some(more) = more.map(Arc::new) else { return old };
        more.vm().mailbox.note_asked(missing);
        // A record that was published meanwhile stays. This request still gets its answer from the record that was in
        // force when it came.
        self.store.replace(slot, &old, Arc::clone(&more));
        more
    }

    /// Returns whether the answer to a request is rendered in advance. Never waits.
    #[must_use]
    pub fn is_fixed(&self, connection: &Connection, request: &Request<'_>) -> bool {
        match self.get(connection.slot, Host::at(connection.local), request.target.path) {
            SlotState::Ready(responses) => responses.is_fixed(connection, request),
            SlotState::Expected => false,
            SlotState::Unknown => true,
        }
    }

    /// Returns whether the record of `slot` has routes at the host. True if the record has not arrived.
    #[must_use]
    pub fn opens(&self, slot: Slot, host: Host) -> bool {
        match self.store.get(slot) {
            SlotState::Ready(responses) => responses.has(host) || dialect::is_missing_at(&responses, host),
            SlotState::Expected => true,
            SlotState::Unknown => false,
        }
    }

    /// Frees what no VM uses any more. Call it about once a minute, off the packet path.
    pub fn sweep(&self) {
        // A poisoned interner is replaced by those of single guests.
        if let Ok(mut interner) = self.interner.lock() {
            interner.sweep();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::OnDemand;
    use crate::dialect;
    use crate::http::{Headers, Method, Request, RequestTarget};
    use crate::record::{Dialect, Dialects, Record};
    use crate::store::{Host, Interner, Responses, SlotState, Store, VmState};
    use metadata_common::addresses::{self, Connection};

    const FULL: &str = include_str!("../../../tests/vectors/record.yaml");

    fn record() -> Arc<Record> {
        Arc::new(Record::parse("full.yaml", FULL).expect("a good record").0)
    }

    /// A record that nobody has asked for, in slot 0.
    fn unasked(record: &Arc<Record>) -> OnDemand {
        let content = OnDemand::new(Store::new(2));
        publish(&content, record);
        content
    }

    fn publish(content: &OnDemand, record: &Arc<Record>) {
        let vm = VmState::alone(record.vm.uuid.as_str());
        let responses = dialect::render_asked(record, &mut Interner::new(), vm, Dialects::NONE);
        content.store().publish(0, Arc::new(responses)).expect("slot 0");
    }

    fn responses(content: &OnDemand, host: Host, path: &str) -> Arc<Responses> {
        match content.get(0, host, path) {
            SlotState::Ready(responses) => responses,
            other => panic!("slot 0 has a record, not {other:?}"),
        }
    }

    fn dialects(responses: &Responses) -> Vec<&'static str> {
        let mut dialects: Vec<_> = responses.routes().map(|(.., route)| route.dialect()).collect();
        dialects.sort_unstable();
        dialects.dedup();
        dialects
    }

    #[test]
    fn a_path_renders_the_dialects_that_may_answer_it_and_no_others() {
        for (host, path, rendered) in [
            (Host::Metadata, "/", &["every dialect"][..]),
            (Host::Metadata, "/of/no/dialect", &["every dialect"]),
            (Host::Metadata, "/v1/events", &["every dialect"]),
            (Host::Metadata, "/v1/user-data", &["akamai", "every dialect", "nocloud"]),
            (Host::Metadata, "/v1/meta-data", &["every dialect", "nocloud"]),
            (Host::Metadata, "/latest/user-data", &["cloudstack", "ec2", "every dialect"]),
            (Host::Metadata, "/2009-04-04/meta-data/ami-id", &["cloudstack", "ec2", "every dialect"]),
            (Host::Metadata, "/openstack/2018-08-27/meta_data.json", &["every dialect", "openstack"]),
            (Host::Metadata, "/openstackx", &["every dialect"]),
            (Host::Scaleway, "/conf", &["every dialect", "scaleway"]),
            (Host::AliYun, "/latest/user-data", &["aliyun", "every dialect"]),
        ] {
            let found = dialects(&responses(&unasked(&record()), host, path));
            assert_eq!(found, rendered, "{host:?} {path}");
        }
    }

    #[test]
    fn maas_answers_below_the_path_that_the_record_names() {
        for base in ["/MAAS/metadata", "/MAAS", "/my/maas", "/latest/maas", "/MAAS/metadata/below"] {
            let mut record = (*record()).clone();
            record.serve.maas_path = serde_json::from_value(base.into()).expect("a path");
            let content = unasked(&Arc::new(record));
            for path in
                [format!("{base}/latest/meta-data/instance-id"), format!("{base}/2012-03-01/user-data")]
            {
                let responses = responses(&content, Host::Metadata, &path);
                assert!(dialects(&responses).contains(&"maas"), "{path}");
            }
        }
    }

    #[test]
    fn the_datasource_in_smbios_is_expected_with_all_that_may_answer_its_paths() {
        use Dialect::{Akamai, CloudStack, Ec2, NoCloud, OpenStack};
        for (stamp, expected) in [
            ("nocloud", &[NoCloud, Akamai][..]),
            ("nocloud-net", &[NoCloud, Akamai]),
            ("ec2", &[CloudStack, Ec2]),
            ("exoscale", &[CloudStack, Ec2]),
            ("openstack", &[OpenStack, CloudStack, Ec2]),
        ] {
            let mut record = (*record()).clone();
            record.serve.smbios = serde_json::from_value(stamp.into()).expect("a stamp");
            assert_eq!(dialect::expected(&record).iter().collect::<Vec<_>>(), expected, "{stamp}");
        }
    }

    #[test]
    fn a_dialect_is_rendered_once_and_stays_beside_the_next() {
        let content = unasked(&record());
        let first = responses(&content, Host::Metadata, "/latest/user-data");
        assert!(Arc::ptr_eq(&first, &responses(&content, Host::Metadata, "/latest/user-data")));
        let both = responses(&content, Host::Metadata, "/openstack");
        assert_eq!(dialects(&both), ["cloudstack", "ec2", "every dialect", "openstack"]);
        assert!(Arc::ptr_eq(&both, &responses(&content, Host::Metadata, "/latest/user-data")));
    }

    #[test]
    fn what_the_guest_asked_for_is_noted_at_its_vm() {
        let content = unasked(&record());
        let asked = |path| responses(&content, Host::Metadata, path).vm().mailbox.asked();
        assert!(asked("/of/no/dialect").is_empty());
        assert_eq!(asked("/latest").iter().collect::<Vec<_>>(), [Dialect::CloudStack, Dialect::Ec2]);
        assert!(asked("/openstack").contains(Dialect::OpenStack));
    }

    #[test]
    fn a_record_published_while_another_is_rendered_stays() {
        let record = record();
        let content = unasked(&record);
        let SlotState::Ready(old) = content.store().get(0) else { panic!("slot 0 was published") };
        publish(&content, &record);
        let missing = dialect::missing(&old, Host::Metadata, "/latest");
        let answering = content.render(0, Arc::clone(&old), missing);
        assert_eq!(
            dialects(&answering),
            ["cloudstack", "ec2", "every dialect"],
            "the request gets its answer"
        );
        let SlotState::Ready(held) = content.store().get(0) else { panic!("slot 0 was published") };
        assert!(!Arc::ptr_eq(&held, &answering) && !Arc::ptr_eq(&held, &old), "the new record stays");
    }

    #[test]
    fn an_answer_lasts_if_the_record_and_the_request_decide_it() {
        let local = (addresses::METADATA.into(), 80);
        let connection = Connection { slot: 0, local, remote: local };
        let lasting = |responses: &Responses, path: &str| {
            let fields = [httparse::Header { name: "Metadata-Flavor", value: b"Google" }];
            let target = RequestTarget { path, query: "" };
            let request = Request { method: Method::Get, target, headers: Headers::new(&fields), body: &[] };
            OnDemand::lasting_answer(responses, &connection, &request, 0)
                .map(|(response, _)| response.status().0)
        };
        let content = unasked(&record());
        for (path, status) in [
            ("/v1/meta-data", Some(200)),
            ("/v1/network-config", Some(200)),
            ("/of/no/dialect", Some(404)),
            ("/openstack/latest/meta_data.json", Some(200)),
            ("/openstack/latest/password", None),
            ("/v1/events", None),
            ("/computeMetadata/v1/instance/id", None),
        ] {
            let SlotState::Ready(before) = content.store().get(0) else { panic!("slot 0 was published") };
            let is_missing = !dialect::missing(&before, Host::Metadata, path).is_empty();
            assert!(!is_missing || lasting(&before, path).is_none(), "{path} before it is rendered");
            assert_eq!(lasting(&responses(&content, Host::Metadata, path), path), status, "{path}");
        }
    }

    #[test]
    fn a_host_is_open_before_its_dialect_is_rendered() {
        let mut only = (*record()).clone();
        only.serve.dialects = Some([Dialect::Azure].into_iter().collect());
        let content = unasked(&Arc::new(only));
        let open = Host::ALL.map(|host| content.opens(0, host));
        assert_eq!(open, [true, true, false, false, false, true], "of {:?}", Host::ALL);
        content.store().expect(1).expect("slot 1");
        assert!(content.opens(1, Host::Password), "the dialects of an expected record are not known");
        assert!(!content.opens(7, Host::Metadata), "no such slot");
    }

    #[test]
    fn a_guest_is_answered_while_another_thread_holds_the_shared_memory() {
        let content = unasked(&record());
        let _held = content.interner.lock().expect("nobody panicked");
        assert_eq!(
            dialects(&responses(&content, Host::Metadata, "/latest")),
            ["cloudstack", "ec2", "every dialect"]
        );
    }

    #[test]
    fn payloads_are_freed_once_their_record_is_gone_and_both_interners_were_swept() {
        let mut records = Interner::new();
        let mut record = (*record()).clone();
        record.compact(|bytes| records.bytes(bytes));
        let record = Arc::new(record);
        let content = OnDemand::new(Store::new(2));
        let vm = VmState::alone(record.vm.uuid.as_str());
        let responses = dialect::render_asked(&record, &mut records, vm, Dialects::NONE);
        content.store().publish(0, Arc::new(responses)).expect("slot 0");
        // Every dialect that may answer these paths is rendered, among them those that embed payloads.
        for (host, path) in [
            (Host::Metadata, "/v1/user-data"),
            (Host::Metadata, "/latest/user-data"),
            (Host::Metadata, "/computeMetadata/v1/instance/attributes/user-data"),
            (Host::Metadata, "/openstack/latest/user_data"),
            (Host::Scaleway, "/conf"),
        ] {
            assert!(matches!(content.get(0, host, path), SlotState::Ready(_)), "{path}");
        }
        content.sweep();
        records.sweep();
        assert!(!records.is_empty(), "the record is in force");
        content.store().withdraw(0).expect("slot 0");
        drop(record);
        content.sweep();
        records.sweep();
        assert!(records.is_empty(), "{} entries outlive the record", records.len());
    }
}
