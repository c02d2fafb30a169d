//! How the two databases and Nova can be reached. The feed writes it; status and metrics read it.

use metadata_content::http::StatusCode;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{InstanceOrigin, OpenstackOptions};
use crate::source::{FailureStreak, OnDemandParty, SourceHealth};

/// What lets Neutron list this agent.
pub(super) const LISTED_BY: &str = "set `openstack.tls` to ovn-controller's files if the database controls access by \
     certificate, or `openstack.listed: false` if nobody needs the list";

/// Whom the feed depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpenstackPeer {
    /// The local OVSDB.
    Ovsdb,
    /// OVN's southbound database.
    Southbound,
    /// libvirt's directory of running domains.
    Libvirt,
    /// Nova's metadata API.
    Nova,
}

impl OpenstackPeer {
    const ALL: [Self; 4] = [Self::Ovsdb, Self::Southbound, Self::Libvirt, Self::Nova];

    /// Those that a node depends on.
    fn of(options: &OpenstackOptions) -> impl Iterator<Item = Self> {
        let origin = options.instances;
        Self::ALL.into_iter().filter(move |peer| match peer {
            Self::Ovsdb | Self::Southbound => origin == InstanceOrigin::Ovn,
            Self::Libvirt => origin == InstanceOrigin::Libvirt,
            Self::Nova => true,
        })
    }

    /// True for one that is probed or watched. Nova is asked only when a guest asks.
    fn is_watched(self) -> bool {
        self != Self::Nova
    }

    fn name(self) -> &'static str {
        match self {
            Self::Ovsdb => "ovsdb",
            Self::Southbound => "southbound",
            Self::Libvirt => "libvirt",
            Self::Nova => "nova",
        }
    }
}

/// The state of the connections.
#[derive(Debug)]
pub struct OpenstackHealth {
    since: Instant,
    inner: Mutex<HealthState>,
}

#[derive(Debug, Default)]
struct HealthState {
    peers: [PeerState; OpenstackPeer::ALL.len()],
    /// Nova refuses the signature.
    is_secret_wrong: bool,
    /// The southbound database has no chassis of this name.
    unknown_chassis: Option<String>,
    /// Why Neutron cannot list this agent.
    unlisted: Option<String>,
}

#[derive(Debug, Default)]
struct PeerState {
    /// When it last answered.
    last_answer: Option<Instant>,
    /// Since when it has not, and why.
    failing: Option<(Instant, String)>,
    failures: u64,
}

impl Default for OpenstackHealth {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenstackHealth {
    /// The state before the first connection.
    #[must_use]
    pub fn new() -> Self {
        Self { since: Instant::now(), inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HealthState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an answer.
    pub(super) fn on_answer(&self, peer: OpenstackPeer) {
        let state = &mut self.lock().peers[peer as usize];
        state.last_answer = Some(Instant::now());
        if state.failing.take().is_some() {
            tracing::info!(peer = peer.name(), "reachable again");
        }
    }

    /// Notes a failure, and logs the first of several.
    pub(super) fn on_failure(&self, peer: OpenstackPeer, reason: String) {
        let state = &mut self.lock().peers[peer as usize];
        state.failures += 1;
        let since = state.failing.as_ref().map(|(since, _)| *since);
        if since.is_none() {
            tracing::warn!(peer = peer.name(), "{reason}");
        }
        state.failing = Some((since.unwrap_or_else(Instant::now), reason));
    }

    /// Notes an answer of Nova.
    pub(super) fn on_nova_answer(&self, status: StatusCode) {
        self.on_answer(OpenstackPeer::Nova);
        let is_wrong = status == StatusCode(403);
        let mut state = self.lock();
        if is_wrong && !state.is_secret_wrong {
            tracing::warn!("Nova refuses the signature of a request (403)");
        }
        state.is_secret_wrong = is_wrong;
    }

    /// True if Nova's last answer accepted the signature.
    pub(super) fn is_nova_well(&self) -> bool {
        let state = self.lock();
        let nova = &state.peers[OpenstackPeer::Nova as usize];
        nova.last_answer.is_some() && nova.failing.is_none() && !state.is_secret_wrong
    }

    /// Notes whether the southbound database has the chassis.
    pub(super) fn set_unknown_chassis(&self, chassis: Option<&str>) {
        self.lock().unknown_chassis = chassis.map(str::to_owned);
    }

    /// Notes why Neutron cannot list this agent, or that it can.
    pub(super) fn set_unlisted(&self, reason: Option<String>) {
        let mut state = self.lock();
        if let (Some(reason), None) = (&reason, &state.unlisted) {
            tracing::warn!("`openstack network agent list` does not show this agent: {reason}");
        }
        state.unlisted = reason;
    }

    /// The state now. `refused` requests of guests were beyond a limit.
    #[must_use]
    pub fn report(&self, options: &OpenstackOptions, refused: u64, now: Instant) -> SourceHealth {
        let ago = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
        let state = self.lock();
        let OpenstackOptions { nova, ovsdb, southbound, domains, .. } = options;
        let domains = domains.display();
        let southbound = southbound.as_deref().unwrap_or("the server of `ovn-remote`");
        let mut problems = Vec::new();
        let peers: Vec<_> =
            OpenstackPeer::of(options).map(|peer| (peer, &state.peers[peer as usize])).collect();
        for (peer, PeerState { failing, .. }) in &peers {
            let Some((since, reason)) = failing else { continue };
            let since = ago(*since);
            problems.push(match peer {
                OpenstackPeer::Ovsdb => format!(
                    "the local OVSDB, {ovsdb}, has been away for {since:.0} s: {reason}; instances stay as they are: see \
                     `systemctl status openvswitch-switch`"
                ),
                OpenstackPeer::Southbound => format!(
                    "OVN's southbound database, {southbound}, has been away for {since:.0} s: {reason}; known instances \
                     are served, and new ones wait: see `ovn-appctl -t ovn-controller connection-status`"
                ),
                OpenstackPeer::Libvirt => format!(
                    "libvirt's running domains, {domains}, have not been readable for {since:.0} s: {reason}; instances \
                     stay as they are: see `systemctl status libvirtd virtqemud`"
                ),
                OpenstackPeer::Nova => format!(
                    "Nova's metadata API, {}, has not answered for {since:.0} s: {reason}; guests get what is kept for \
                     some seconds, and then 503: see that nova-api-metadata runs and is reachable from here",
                    nova.url
                ),
            });
        }
        problems.extend(state.is_secret_wrong.then(|| {
            format!(
                "Nova refuses our signature (403): expected the secret of `metadata_proxy_shared_secret` of [neutron] in \
                 nova.conf in {}, found another; copy it there, and the next request uses it",
                nova.secret.display()
            )
        }));
        problems.extend(state.unknown_chassis.as_ref().map(|chassis| {
            format!(
                "OVN's southbound database has no chassis {chassis}: see that ovn-controller runs, or set \
                 `openstack.chassis` to its name in `ovn-sbctl list Chassis`"
            )
        }));
        problems.extend(state.unlisted.as_ref().map(|reason| {
            format!(
                "`openstack network agent list` does not show this agent as alive: {reason}; guests are served: {LISTED_BY}"
            )
        }));
        // The agent probes a silent database, and watches libvirt's directory. So each counts as just read until it fails.
        let watched = || peers.iter().filter(|(peer, _)| peer.is_watched());
        let read = |state: &PeerState| {
            let last = state.failing.as_ref().map_or(now, |(since, _)| *since);
            state.last_answer.and(Some(last))
        };
        let answered = watched().map(|(_, state)| read(state)).min().flatten();
        // `answered` stays `None` until both databases have answered. Meanwhile the note names the one that has not.
        let (heard, silent): (Vec<_>, Vec<_>) = watched().partition(|(_, state)| state.last_answer.is_some());
        let notes = match (&heard[..], &silent[..]) {
            ([(heard, _)], [(silent, _)]) => {
                vec![format!("no answer yet from {}; {} has answered", silent.name(), heard.name())]
            }
            _ => Vec::new(),
        };
        let nova_state = &state.peers[OpenstackPeer::Nova as usize];
        let away = match (&nova_state.failing, nova_state.last_answer) {
            (_, None) => ago(self.since),
            (Some((since, _)), Some(_)) => ago(*since),
            (None, Some(_)) => 0.0,
        };
        let on_demand = OnDemandParty {
            name: format!("Nova at {}", nova.url),
            answered: nova_state.last_answer.map(ago),
            away,
        };
        let failing = peers.iter().find_map(|(peer, state)| {
            let (since, reason) = state.failing.as_ref()?;
            Some(FailureStreak { since: ago(*since), kind: peer.name().to_owned(), reason: reason.clone() })
        });
        let failures = peers.iter().map(|(peer, state)| (peer.name().to_owned(), state.failures));
        let failures: BTreeMap<_, _> = failures.chain([("crowded".to_owned(), refused)]).collect();
        let reads = match options.instances {
            InstanceOrigin::Ovn => format!("{ovsdb} and {southbound}"),
            InstanceOrigin::Libvirt => domains.to_string(),
        };
        SourceHealth {
            reads,
            asked_for: ago(self.since),
            answered: answered.map(ago),
            on_demand: Some(on_demand),
            failing,
            failures,
            notes,
            problems,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{OpenstackHealth, OpenstackPeer};
    use crate::openstack::{InstanceOrigin, OpenstackOptions};
    use metadata_content::http::StatusCode;
    use std::time::{Duration, Instant};

    #[test]
    fn each_problem_names_who_is_away_and_what_to_look_at() {
        type Case = (&'static str, fn(&OpenstackHealth), &'static [&'static str]);
        let cases: [Case; 8] = [
            ("nothing", |_| {}, &[]),
            ("OVSDB", |health| health.on_failure(OpenstackPeer::Ovsdb, "no".into()), &["openvswitch", "no"]),
            (
                "southbound",
                |health| health.on_failure(OpenstackPeer::Southbound, "no".into()),
                &["ovn-remote", "new ones wait"],
            ),
            (
                "libvirt",
                |health| health.on_failure(OpenstackPeer::Libvirt, "no".into()),
                &["/run/libvirt/qemu", "virtqemud"],
            ),
            (
                "Nova",
                |health| health.on_failure(OpenstackPeer::Nova, "refused".into()),
                &["http://127.0.0.1:8775", "refused", "503"],
            ),
            (
                "the secret",
                |health| health.on_nova_answer(StatusCode(403)),
                &["403", "metadata_proxy_shared_secret", "/etc/xdp-imds/nova-secret"],
            ),
            (
                "the chassis",
                |health| health.set_unknown_chassis(Some("n1")),
                &["no chassis n1", "openstack.chassis"],
            ),
            (
                "Neutron's list",
                |health| health.set_unlisted(Some("permission error".into())),
                &["agent list", "permission error", "guests are served", "openstack.listed: false"],
            ),
        ];
        for (what, change, words) in cases {
            let health = OpenstackHealth::new();
            change(&health);
            let instances = if what == "libvirt" { InstanceOrigin::Libvirt } else { InstanceOrigin::Ovn };
            let options = OpenstackOptions { instances, ..OpenstackOptions::default() };
            let report = health.report(&options, 0, Instant::now());
            assert_eq!(report.problems.is_empty(), words.is_empty(), "{what}: {:?}", report.problems);
            let said = report.problems.concat();
            assert!(words.iter().all(|word| said.contains(word)), "{what}: {said}");
        }
        let health = OpenstackHealth::new();
        let notes = |health: &OpenstackHealth| {
            health.report(&OpenstackOptions::default(), 0, Instant::now()).notes.concat()
        };
        assert_eq!(notes(&health), "", "nobody has answered, which `answered` says");
        health.on_failure(OpenstackPeer::Nova, "no".into());
        health.on_answer(OpenstackPeer::Ovsdb);
        assert_eq!(notes(&health), "no answer yet from southbound; ovsdb has answered");
        health.on_answer(OpenstackPeer::Southbound);
        assert_eq!(notes(&health), "", "Nova is none of those that are read");
        health.on_nova_answer(StatusCode(200));
        let report = health.report(&OpenstackOptions::default(), 0, Instant::now());
        assert_eq!((report.problems.len(), report.failing), (0, None));
    }

    /// Seconds since the databases were read, since Nova's last answer, and since Nova went away, at a later time.
    fn seen(health: &OpenstackHealth, after: u64) -> (Option<f64>, Option<f64>, f64) {
        let now = Instant::now() + Duration::from_secs(after);
        let report = health.report(&OpenstackOptions::default(), 0, now);
        let nova = report.on_demand.expect("Nova");
        assert_eq!(nova.name, "Nova at http://127.0.0.1:8775");
        assert!(!report.reads.contains("8775"), "{}", report.reads);
        (report.answered.map(f64::round), nova.answered.map(f64::round), nova.away.round())
    }

    #[test]
    fn only_the_time_since_a_party_went_away_is_silence() {
        const DATABASES: [OpenstackPeer; 2] = [OpenstackPeer::Ovsdb, OpenstackPeer::Southbound];
        let health = OpenstackHealth::new();
        assert_eq!(seen(&health, 600), (None, None, 600.0), "nobody has answered");
        health.on_answer(OpenstackPeer::Nova);
        assert_eq!(seen(&health, 600), (None, Some(600.0), 0.0), "no database has answered");
        DATABASES.iter().for_each(|database| health.on_answer(*database));
        assert_eq!(seen(&health, 600), (Some(0.0), Some(600.0), 0.0), "nothing changes, and nobody is away");
        for database in DATABASES {
            health.on_failure(database, "no".into());
            health.on_failure(database, "no again".into());
            assert_eq!(seen(&health, 600), (Some(600.0), Some(600.0), 0.0), "{database:?}");
            health.on_answer(database);
            assert_eq!(seen(&health, 600), (Some(0.0), Some(600.0), 0.0), "{database:?}");
        }
    }

    #[test]
    fn nova_counts_from_its_last_answer_and_says_nothing_of_the_databases() {
        let health = OpenstackHealth::new();
        [OpenstackPeer::Ovsdb, OpenstackPeer::Southbound].iter().for_each(|peer| health.on_answer(*peer));
        health.on_failure(OpenstackPeer::Nova, "no".into());
        assert_eq!(seen(&health, 600), (Some(0.0), None, 600.0), "Nova has never answered");
        health.on_nova_answer(StatusCode(200));
        assert_eq!(seen(&health, 12), (Some(0.0), Some(12.0), 0.0), "no guest has asked since");
        health.on_failure(OpenstackPeer::Nova, "no".into());
        health.on_failure(OpenstackPeer::Nova, "no again".into());
        assert_eq!(seen(&health, 600), (Some(0.0), Some(600.0), 600.0), "it is away");
        health.on_nova_answer(StatusCode(404));
        assert_eq!(seen(&health, 600), (Some(0.0), Some(600.0), 0.0), "it is back");
    }
}
