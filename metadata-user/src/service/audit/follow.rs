//! What guests have asked while somebody follows them: `xdp-imds top`, or a viewer of the page.
//!
//! It lives on the control side and is filled from the workers' tapes. While nobody follows, there is no
//! [`FollowedGuests`], and the tapes are off unless there is an audit log.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use metadata_common::maps::Slot;
use metadata_content::store::Datasource;

use super::AuditEntry;

/// How long guests are followed after a viewer has asked for the last time.
pub const FOLLOW_FOR: Duration = Duration::from_secs(30);
/// Number of last requests that are kept of each guest, 2 KiB together.
pub const LAST_REQUESTS: usize = 16;

/// After this long without a request the next one begins a boot, and so does one for user-data after this long a boot.
/// Guests that ask more often all the time do not boot each time.
pub const BOOT_PAUSE: Duration = Duration::from_secs(60);

/// The guests that have sent requests since somebody began to follow them.
#[derive(Debug)]
pub struct FollowedGuests {
    since: Instant,
    until: Instant,
    /// One for each slot at most, so the number of slots limits them.
    guests: HashMap<Slot, FollowedGuest>,
}

/// What one guest has asked.
#[derive(Debug)]
pub struct FollowedGuest {
    /// The owner of its VM; `None` while its record has not arrived.
    pub vm: Option<Box<str>>,
    /// When its first answer was collected.
    pub first: Instant,
    /// When the first answer of its last boot was collected: see [`BOOT_PAUSE`].
    pub boot: Instant,
    /// When its last answer was collected.
    pub last: Instant,
    /// Number of its requests.
    pub requests: u64,
    /// Number of requests that were answered with a status of 429 or at least 500.
    pub failed: u64,
    /// The dialect that first answered with success. A client may ask others later, as cloud-init asks OpenStack's EC2
    /// tree.
    pub dialect: Option<Datasource>,
    /// It has got user-data.
    pub has_user_data: bool,
    /// Its last requests, the newest last; at most [`LAST_REQUESTS`].
    pub lately: VecDeque<FollowedRequest>,
}

/// An answered request.
#[derive(Debug)]
pub struct FollowedRequest {
    /// When the answer was collected.
    pub at: Instant,
    /// The method.
    pub method: &'static str,
    /// The path as sent, without its query.
    pub path: Box<str>,
    /// The dialect that answered.
    pub dialect: Datasource,
    /// The HTTP status.
    pub status: u16,
    /// Bytes of the body.
    pub bytes: u64,
    /// Time from the turn that received the last byte until TCP had the answer.
    pub took: Duration,
}

impl FollowedGuests {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, until: now, guests: HashMap::new() }
    }

    pub(crate) fn renew(&mut self, now: Instant) {
        self.until = now + FOLLOW_FOR;
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now > self.until
    }

    /// When the following began.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// What the guest of a slot has asked.
    #[must_use]
    pub fn guest(&self, slot: Slot) -> Option<&FollowedGuest> {
        self.guests.get(&slot)
    }

    /// Number of guests that have asked.
    #[must_use]
    pub fn count(&self) -> usize {
        self.guests.len()
    }

    pub(crate) fn note(&mut self, entry: &AuditEntry, took: Duration, now: Instant) {
        let vm = entry.responses.as_ref().map(|responses| &*responses.vm().owner);
        // The slot has another guest now.
        if let (Some(guest), Some(vm)) = (self.guests.get(&entry.slot), vm)
            && guest.vm.as_deref().is_some_and(|former| former != vm)
        {
            self.guests.remove(&entry.slot);
        }
        let guest = self.guests.entry(entry.slot).or_insert_with(|| FollowedGuest::new(now));
        guest.note(entry, vm, took, now);
    }
}

impl FollowedGuest {
    fn new(now: Instant) -> Self {
        Self {
            vm: None,
            first: now,
            boot: now,
            last: now,
            requests: 0,
            failed: 0,
            dialect: None,
            has_user_data: false,
            lately: VecDeque::new(),
        }
    }

    fn note(&mut self, entry: &AuditEntry, vm: Option<&str>, took: Duration, now: Instant) {
        let (status, times, path) = (entry.status.0, u64::from(entry.sampled), entry.path.as_str());
        let is_good = (200..300).contains(&status);
        if self.vm.is_none() {
            self.vm = vm.map(Into::into);
        }
        let is_user_data = is_user_data(path);
        let begun = if is_user_data { self.boot } else { self.last };
        if now.saturating_duration_since(begun) >= BOOT_PAUSE {
            self.boot = now;
        }
        self.last = now;
        self.requests += times;
        self.failed += if status == 429 || status >= 500 { times } else { 0 };
        if self.dialect.is_none()
            && is_good
            && ![Datasource::NONE, Datasource::ANY].contains(&entry.datasource)
        {
            self.dialect = Some(entry.datasource);
        }
        self.has_user_data |= is_good && is_user_data;
        if self.lately.len() == LAST_REQUESTS {
            self.lately.pop_front();
        }
        self.lately.push_back(FollowedRequest {
            at: now,
            method: entry.method.as_str(),
            path: path.into(),
            dialect: entry.datasource,
            status,
            bytes: entry.bytes,
            took,
        });
    }
}

/// True for a path whose last part is a cloud's spelling of user-data: `user-data`, `user_data`, `userdata`,
/// `userData`.
fn is_user_data(path: &str) -> bool {
    let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let letters =
        last.bytes().filter(|byte| !matches!(byte, b'-' | b'_')).map(|byte| byte.to_ascii_lowercase());
    letters.eq(b"userdata".iter().copied())
}

#[cfg(test)]
mod tests {
    use super::{FollowedGuests, LAST_REQUESTS, is_user_data};
    use crate::service::audit::{AuditEntry, Path};
    use metadata_common::addresses::Connection;
    use metadata_content::http::{Method, StatusCode};
    use metadata_content::store::{Datasource, Responses, VmState};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn entry(slot: u32, path: &str, status: u16, dialect: &str) -> AuditEntry {
        let (local, remote) = (([169, 254, 169, 254].into(), 80), ([10, 0, 0, 1].into(), 4_711));
        let connection = Connection { slot, local, remote };
        let (path, status) = (Path::of(path), StatusCode(status));
        let datasource = Datasource::named(dialect);
        AuditEntry { method: Method::Get, path, datasource, status, ..AuditEntry::of(&connection, 1) }
    }

    #[test]
    fn a_guest_has_found_the_dialect_that_first_answered_with_success() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        for (path, status, dialect, found, user_data) in [
            ("/latest/meta-data", 404, "none", None, false),
            ("/", 200, "every dialect", None, false),
            ("/v1/user-data", 404, "nocloud", None, false),
            ("/v1/meta-data", 200, "nocloud", Some("nocloud"), false),
            ("/v1/user-data?x", 200, "nocloud", Some("nocloud"), true),
            ("/openstack", 200, "openstack", Some("nocloud"), true),
        ] {
            following.note(&entry(3, path, status, dialect), Duration::ZERO, now);
            let guest = following.guest(3).expect("followed");
            let label = guest.dialect.map(Datasource::label);
            assert_eq!((label, guest.has_user_data), (found, user_data), "after {path}");
        }
        assert_eq!(following.guest(3).map(|guest| guest.requests), Some(6));
    }

    #[test]
    fn sampled_answers_count_as_often_as_they_stand_for() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        following.note(&AuditEntry { sampled: 16, ..entry(3, "/", 200, "ec2") }, Duration::ZERO, now);
        following.note(&entry(3, "/", 503, "ec2"), Duration::ZERO, now);
        let guest = following.guest(3).expect("followed");
        assert_eq!((guest.requests, guest.failed, guest.lately.len()), (17, 1, 2));
    }

    #[test]
    fn only_the_last_requests_are_kept() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        let paths: Vec<_> = (0..2 * LAST_REQUESTS).map(|number| format!("/{number}")).collect();
        for path in &paths {
            following.note(&entry(3, path, 200, "ec2"), Duration::ZERO, now);
        }
        let guest = following.guest(3).expect("followed");
        assert!(guest.lately.iter().map(|request| &*request.path).eq(&paths[LAST_REQUESTS..]));
    }

    #[test]
    fn the_next_guest_of_a_slot_begins_anew() {
        let now = Instant::now();
        let mut following = FollowedGuests::new(now);
        for (vm, requests) in [("a", 1), ("a", 2), ("b", 1)] {
            let responses = Some(Arc::new(Responses::builder(VmState::alone(vm)).build()));
            following.note(&AuditEntry { responses, ..entry(3, "/", 200, "ec2") }, Duration::ZERO, now);
            assert_eq!(following.guest(3).map(|guest| guest.requests), Some(requests), "{vm}");
        }
    }

    #[test]
    fn a_boot_begins_after_a_pause_or_with_user_data_and_not_with_each_poll() {
        let start = Instant::now();
        let mut following = FollowedGuests::new(start);
        // Each row: when a request comes, its path, and when the boot it belongs to began, in seconds.
        for (at, path, boot) in [
            (0, "/v1/meta-data", 0),
            (5, "/v1/user-data", 0),
            (50, "/poll", 0),
            (100, "/poll", 0),
            // It polls until it reboots, and begins anew within the minute.
            (130, "/v1/meta-data", 0),
            (131, "/v1/user-data", 131),
            (135, "/v1/user-data", 131),
            (194, "/poll", 131),
            (254, "/v1/meta-data", 254),
        ] {
            let now = start + Duration::from_secs(at);
            following.note(&entry(3, path, 200, "nocloud"), Duration::ZERO, now);
            let guest = following.guest(3).expect("followed");
            assert_eq!(guest.boot, start + Duration::from_secs(boot), "{path} after {at} s");
        }
        assert_eq!(following.guest(3).map(|guest| guest.first), Some(start));
    }

    #[test]
    fn user_data_has_the_spelling_of_any_cloud() {
        let cases = [
            ("/latest/user-data", true),
            ("/openstack/latest/user_data", true),
            ("/computeMetadata/v1/instance/attributes/user-data", true),
            ("/hetzner/v1/userdata", true),
            ("/metadata/instance/compute/userData/", true),
            ("/user-data/x", false),
            ("/latest/meta-data", false),
            ("/", false),
        ];
        for (path, is) in cases {
            assert_eq!(is_user_data(path), is, "{path}");
        }
    }
}
