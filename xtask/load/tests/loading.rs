//! Hypervisors are loaded, upgraded and unloaded over ssh while their guests ask.
//!
//! A hypervisor here is a network namespace with taps, and in it an sshd that sees processes and files of its own.

#[path = "loading/hypervisor.rs"]
mod hypervisor;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hypervisor::{Hypervisor, Init, PLACES, Site};
use serde_json::Value;
use testbed::answers::PATHS;
use testbed::eventually;
use testbed::guest::Guest;
use testbed::privileged;

/// The states of hosts in the results, in order.
fn outcomes(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["outcome"].as_str().expect("an outcome")).collect()
}

/// Loads, upgrades and rolls back hypervisors while their guests ask.
fn no_request_fails(count: u16, init: Init) {
    let site = Site::new(count, init);
    let each = |of: fn(&Hypervisor) -> Vec<String>| site.hypervisors.iter().map(of).collect::<Vec<_>>();
    let pids = || each(|one| vec![one.pid().to_string()]);
    let all = |outcome| vec![outcome; usize::from(count)];
    let loaded = site.succeeds(&["load", "--agent", &site.agent("first"), "--config", &site.config()]);
    assert_eq!(outcomes(&loaded), all("loaded"));
    let mut processes = vec![pids()];

    let asking = Asking::start(&site);
    let upgraded = site.succeeds(&["load", "--agent", &site.agent("second")]);
    assert_eq!(outcomes(&upgraded), all("upgraded"));
    let binaries = each(Hypervisor::digests);
    processes.push(pids());
    let rolled_back = site.succeeds(&["load", "--rollback"]);
    assert_eq!(outcomes(&rolled_back), all("rolled_back"));
    processes.push(pids());
    let asked = asking.stop();

    assert_eq!(asked.failures, Vec::<String>::new(), "of {} requests", asked.answered);
    assert!(asked.every_guest_was_answered(), "{asked:?}");
    for (now, then) in each(Hypervisor::digests).iter().zip(&binaries) {
        assert_ne!(now[0], now[1], "two binaries are kept");
        assert_eq!([&now[0], &now[1]], [&then[1], &then[0]], "a rollback exchanges them");
    }
    for pair in processes.windows(2) {
        assert!(pair[0].iter().zip(&pair[1]).all(|(one, other)| one != other), "{processes:?}");
    }
}

#[test]
fn two_hypervisors_are_loaded_upgraded_and_rolled_back_without_a_failed_request() {
    if privileged::or_skip_for(hypervisor::missing().as_deref()) {
        no_request_fails(2, Init::Sshd);
    }
}

#[test]
fn a_service_of_systemd_is_loaded_upgraded_and_rolled_back_without_a_failed_request() {
    if privileged::or_skip_for(hypervisor::missing().as_deref()) {
        no_request_fails(1, Init::Systemd);
    }
}

#[test]
fn after_an_unload_no_guest_is_answered_and_nothing_is_left() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let kept = ["/etc/xdp-imds", "/var/lib/xdp-imds", "/var/log/xdp-imds"];
    // Only the unit makes a directory for logs.
    for (init, kept) in [(Init::Sshd, &kept[..2]), (Init::Systemd, &kept)] {
        let site = Site::new(1, init);
        site.succeeds(&["load", "--agent", &site.agent("first"), "--config", &site.config()]);
        let one = &site.hypervisors[0];
        one.guests[0].fetch_own(PATHS[0], PATIENCE).expect("an answer");

        assert_eq!(outcomes(&site.succeeds(&["unload"])), ["unloaded"]);
        assert_eq!(one.present(), kept, "{init:?}");
        assert!(!one.pinned().contains("xdp-imds"), "{init:?}: {}", one.pinned());
        assert!(
            !one.host.ns().ip("link").expect("links").contains("prog/xdp"),
            "{init:?}: a program is left"
        );
        let error = one.guests[0].fetch(PATHS[0], SILENCE).expect_err("nobody answers");
        assert!(format!("{error:#}").contains("timed out"), "{init:?}: {error:#}");
        assert_eq!(outcomes(&site.succeeds(&["unload", "--purge"])), ["unloaded"]);
        assert_eq!(one.present(), Vec::<&str>::new(), "{init:?}");
    }
}

#[test]
fn a_host_loads_itself_without_ssh_and_serves_a_directory_of_records() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1, Init::Sshd);
    let one = &site.hypervisors[0];
    one.give(env!("CARGO_BIN_EXE_xdp-imds-load"), "verb");
    one.give(&site.agent("first"), "agent");
    let loaded = one.on("/srv/files/verb load --agent /srv/files/agent");
    assert!(loaded.contains("this host") && loaded.contains(" loaded "), "{loaded}");
    let guest = &one.guests[0];
    let mut record: Value = serde_json::from_str(&guest.identity().record(1)).expect("a record");
    record["network"]["nics"][0]["port"] = serde_json::json!({"ifname": guest.host_tap().name()});
    one.give(&site.file("record", &record.to_string()), "guest.yaml");
    one.on("install -m 0640 /srv/files/guest.yaml /etc/xdp-imds/records.d");
    eventually(PATIENCE, || guest.fetch_own(PATHS[0], SILENCE)).expect("an answer");
    let unloaded = one.on("/srv/files/verb unload --purge");
    assert!(unloaded.contains(" unloaded "), "{unloaded}");
    assert_eq!(one.present(), Vec::<&str>::new());
    let again = one.on("/srv/files/verb unload");
    assert!(again.contains("untouched"), "{again}");
}

#[test]
fn a_host_that_cannot_serve_stays_as_it_is_and_so_do_those_after_it() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(2, Init::Sshd);
    site.hypervisors[0].on("umount /srv/records && rmdir /srv/records");
    let words = ["load", "--agent", &site.agent("first"), "--config", &site.config()];
    let dry = site.succeeds(&[&words[..], &["--dry-run"]].concat());
    assert_eq!(outcomes(&dry), ["dry_run", "dry_run"]);
    let (rows, said) = site.fails(&words);
    assert_eq!(outcomes(&rows), ["failed", "untouched"]);
    assert!(said.contains("FAIL") && said.contains("nothing was changed"), "{said}");
    for one in &site.hypervisors {
        assert_eq!(one.present(), Vec::<&str>::new(), "{}", one.name);
    }
}

#[test]
fn a_host_that_cannot_be_reached_is_a_row_and_the_others_stay_as_they_are() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1, Init::Sshd);
    // The name is resolved nowhere, so `ssh` fails at once.
    let words = ["load", "--agent", &site.agent("first"), "--host", "nosuch.invalid"];
    let (rows, said) = site.fails(&words);
    assert_eq!(outcomes(&rows), ["failed", "untouched"], "{said}");
    assert!(said.contains("nosuch.invalid") && said.contains("nothing was changed"), "{said}");
    assert_eq!(site.hypervisors[0].present(), Vec::<&str>::new());
    let (rows, said) = site.fails(&["load", "--rollback"]);
    assert_eq!(outcomes(&rows), ["failed"], "{said}");
    assert!(said.contains("no binary to go back to"), "{said}");
}

#[test]
fn a_configuration_that_the_doctor_refuses_leaves_the_agent_that_runs_alone() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1, Init::Sshd);
    let one = &site.hypervisors[0];
    site.succeeds(&["load", "--agent", &site.agent("first"), "--config", &site.config()]);
    let before = (one.pid(), one.digests());
    // Somebody has broken the host's own file, so that no command can read it.
    one.on("echo 'unknown: field' >> /etc/xdp-imds/config.yaml");
    let (_, said) = site.fails(&["load", "--agent", &site.agent("second")]);
    assert!(said.contains("FAIL") && said.contains("the agent that ran before still serves"), "{said}");
    assert_eq!((one.pid(), one.digests()), before);
}

/// Ends the agent of a hypervisor, so that its taps stay closed.
fn end(one: &Hypervisor, init: Init) {
    one.on(match init {
        Init::Systemd => "systemctl stop xdp-imds",
        // A process that has ended may wait for its parent. It has no executable then.
        Init::Sshd => {
            "read -r pid < /run/xdp-imds.pid && kill -9 $pid && \
             while readlink /proc/$pid/exe > /dev/null; do sleep 0.1; done"
        }
    });
}

#[test]
fn an_agent_that_has_ended_is_started_by_the_next_load() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    for init in [Init::Sshd, Init::Systemd] {
        let site = Site::new(1, init);
        let one = &site.hypervisors[0];
        let agent = site.agent("first");
        site.succeeds(&["load", "--agent", &agent, "--config", &site.config()]);
        end(one, init);
        assert_eq!(outcomes(&site.succeeds(&["load", "--agent", &agent])), ["loaded"], "{init:?}");
        one.guests[0].fetch_own(PATHS[0], PATIENCE).expect("an answer");
        assert_eq!(one.digests().len(), 1, "{init:?}: the same binary is not kept twice");
    }
}

#[test]
fn a_host_is_unloaded_after_its_agent_has_ended_and_a_load_has_failed() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1, Init::Sshd);
    let one = &site.hypervisors[0];
    let agent = site.agent("first");
    site.succeeds(&["load", "--agent", &agent, "--config", &site.config()]);
    end(one, Init::Sshd);
    let bad = site.file("bad.yaml", "unknown: field\n");
    let (_, said) = site.fails(&["load", "--agent", &agent, "--config", &bad]);
    assert!(said.contains("FAIL") && said.contains("nothing was changed"), "{said}");
    assert!(!said.contains("still serves"), "{said}");
    assert_eq!(outcomes(&site.succeeds(&["unload"])), ["unloaded"]);
    assert_eq!(one.present(), ["/etc/xdp-imds", "/var/lib/xdp-imds"]);
    assert!(!one.pinned().contains("xdp-imds"), "{}", one.pinned());
}

#[test]
fn after_an_upgrade_that_fails_the_previous_agent_serves_and_waiting_requests_are_answered() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    for init in [Init::Sshd, Init::Systemd] {
        previous_agent_serves_again(init);
    }
}

/// Upgrades to an agent that fails with the ports in its hands.
fn previous_agent_serves_again(init: Init) {
    let site = Site::new(1, init);
    let one = &site.hypervisors[0];
    let with_metrics =
        |name, address| site.file(name, &format!("{}metrics: {address}:9109\n", site.configuration()));
    let good = with_metrics("good.yaml", "127.0.0.2");
    site.succeeds(&["load", "--agent", &site.agent("first"), "--config", &good]);
    let digests = one.digests();

    let asking = Asking::start(&site);
    // The previous agent has the port, so the new one takes it for free until it has the guests' ports in its hands.
    let _other = one.host.ns().run_in(|| TcpListener::bind("127.0.0.1:9109")).expect("a listener");
    let bad = with_metrics("bad.yaml", "127.0.0.1");
    let (rows, said) = site.fails(&["load", "--agent", &site.agent("second"), "--config", &bad]);
    let asked = asking.stop();
    assert_eq!(outcomes(&rows), ["failed"]);
    assert!(said.contains("127.0.0.1:9109") && said.contains("the previous agent serves again"), "{said}");
    assert_eq!(one.digests(), digests);
    assert!(!one.on("cat /etc/xdp-imds/config.yaml").contains("127.0.0.1"), "the configuration is back");
    assert_eq!(asked.failures, Vec::<String>::new(), "of {} requests", asked.answered);
}

#[test]
fn the_host_of_a_package_is_refused_with_the_way_to_go_on() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1, Init::Sshd);
    site.hypervisors[0].on("printf '/.\\n/usr/bin/xdp-imds\\n' > /var/lib/dpkg/info/xdp-imds.list && \
         printf 'Package: xdp-imds\\nStatus: install ok installed\\nMaintainer: m\\nArchitecture: amd64\\n\
         Version: 0.1.0-1\\nDescription: d\\n\\n' >> /var/lib/dpkg/status");
    for words in [&["load", "--agent", &site.agent("first")][..], &["unload"]] {
        let (rows, said) = site.fails(words);
        assert_eq!(outcomes(&rows), ["failed"], "{words:?}");
        assert!(said.contains("apt-get install") && said.contains("apt-get purge"), "{words:?}: {said}");
        assert!(PLACES.iter().all(|place| !site.hypervisors[0].present().contains(place)), "{words:?}");
    }
}

// Guests that ask again and again while something else happens.

/// Limit for each request that must be answered, also if it waits for the next agent on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two requests of a guest. It leaves time to the hypervisors, which share the processors with their guests.
const PAUSE: Duration = Duration::from_millis(10);
/// How long a request waits that must not be answered: three SYNs.
const SILENCE: Duration = Duration::from_secs(4);

/// Threads of guests that ask.
struct Asking {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<(u64, Vec<String>)>>,
}

/// What all guests got.
#[derive(Debug)]
struct AnswerTally {
    /// Requests answered from the guest's own record.
    answered: u64,
    failures: Vec<String>,
    fewest: u64,
}

impl AnswerTally {
    fn every_guest_was_answered(&self) -> bool {
        self.fewest > 0
    }
}

impl Asking {
    /// Lets every guest of the site ask for its documents in turn.
    fn start(site: &Site) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let guests = site.hypervisors.iter().flat_map(|one| &one.guests);
        let threads = guests.map(|guest| {
            let (guest, stop) = (Arc::clone(guest), Arc::clone(&stop));
            std::thread::spawn(move || ask(&guest, &stop))
        });
        Self { threads: threads.collect(), stop }
    }

    /// Ends the requests.
    fn stop(self) -> AnswerTally {
        self.stop.store(true, Ordering::Relaxed);
        let mut asked = AnswerTally { answered: 0, failures: Vec::new(), fewest: u64::MAX };
        for thread in self.threads {
            let (answered, failures) = thread.join().expect("asking does not panic");
            asked.answered += answered;
            asked.fewest = asked.fewest.min(answered);
            asked.failures.extend(failures);
        }
        println!("{} requests, {} failed", asked.answered, asked.failures.len());
        asked
    }
}

fn ask(guest: &Guest, stop: &AtomicBool) -> (u64, Vec<String>) {
    let (mut answered, mut failures) = (0, Vec::new());
    for path in PATHS.iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        match guest.fetch_own(path, PATIENCE) {
            Ok(_) => answered += 1,
            Err(error) => failures.push(format!("{error:#}")),
        }
        std::thread::sleep(PAUSE);
    }
    (answered, failures)
}
