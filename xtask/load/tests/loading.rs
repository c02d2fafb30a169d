//! Hypervisors are loaded, upgraded and unloaded over ssh while their guests ask.
//!
//! A hypervisor here is a network namespace with taps, and in it an sshd that sees processes and files of its own.

#[path = "loading/guests.rs"]
mod guests;
#[path = "loading/hypervisor.rs"]
mod hypervisor;

use guests::Asking;
use hypervisor::{PLACES, Site};
use serde_json::Value;
use testbed::answers::PATHS;
use testbed::privileged;

/// The states of hosts in the results, in order.
fn outcomes(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["outcome"].as_str().expect("an outcome")).collect()
}

#[test]
fn guests_are_served_after_a_load_and_no_request_fails_in_an_upgrade_or_a_rollback() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(2);
    let (first, second) = (site.agent("first"), site.agent("second"));
    let loaded = site.succeeds(&["load", "--agent", &first, "--config", &site.config()]);
    assert_eq!(outcomes(&loaded), ["loaded", "loaded"]);
    let before: Vec<_> = site.hypervisors.iter().map(|one| one.pid()).collect();

    let asking = Asking::start(&site);
    let upgraded = site.succeeds(&["load", "--agent", &second]);
    let between: Vec<_> = site.hypervisors.iter().map(|one| one.pid()).collect();
    assert_eq!(outcomes(&upgraded), ["upgraded", "upgraded"]);
    let upgraded_to = site.hypervisors.iter().map(|one| one.digests()).collect::<Vec<_>>();
    let rolled_back = site.succeeds(&["load", "--rollback"]);
    assert_eq!(outcomes(&rolled_back), ["upgraded", "upgraded"]);
    let rolled_back_to = site.hypervisors.iter().map(|one| one.digests()).collect::<Vec<_>>();
    let asked = asking.stop();

    for (one, (before, between)) in site.hypervisors.iter().zip(before.iter().zip(&between)) {
        assert!(before != between && *between != one.pid(), "{}: a new process each time", one.name);
    }
    for (now, then) in rolled_back_to.iter().zip(&upgraded_to) {
        assert_ne!(now[0], now[1], "two binaries are kept");
        assert_eq!([&now[0], &now[1]], [&then[1], &then[0]], "a rollback exchanges them");
    }
    assert_eq!(asked.failures, Vec::<String>::new(), "of {} requests", asked.answered);
    assert!(asked.every_guest_was_answered(), "{asked:?}");
}

#[test]
fn after_an_unload_no_guest_is_answered_and_nothing_is_left() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1);
    site.succeeds(&["load", "--agent", &site.agent("first"), "--config", &site.config()]);
    let one = &site.hypervisors[0];
    one.guests[0].fetch_own(PATHS[0], guests::PATIENCE).expect("an answer");

    assert_eq!(outcomes(&site.succeeds(&["unload"])), ["unloaded"]);
    assert_eq!(one.present(), ["/etc/xdp-imds", "/var/lib/xdp-imds"]);
    assert!(!one.pinned().contains("xdp-imds"), "{}", one.pinned());
    assert!(!one.host.ns().ip("link").expect("links").contains("prog/xdp"), "a program is left on a tap");
    let error = one.guests[0].fetch(PATHS[0], guests::SILENCE).expect_err("nobody answers");
    assert!(format!("{error:#}").contains("timed out"), "{error:#}");
    assert_eq!(outcomes(&site.succeeds(&["unload", "--purge"])), ["unloaded"]);
    assert_eq!(one.present(), Vec::<&str>::new());
}

#[test]
fn a_host_that_cannot_serve_stays_as_it_is_and_so_do_those_after_it() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(2);
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
fn after_an_upgrade_that_fails_the_previous_agent_serves_and_waiting_requests_are_answered() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1);
    let one = &site.hypervisors[0];
    site.succeeds(&["load", "--agent", &site.agent("first"), "--config", &site.config()]);
    let digests = one.digests();

    let asking = Asking::start(&site);
    // The new agent notices only with the ports in its hands that it cannot listen there.
    let bad = site.file("bad.yaml", &format!("{}metrics: 192.0.2.1:1\n", site.configuration()));
    let (rows, said) = site.fails(&["load", "--agent", &site.agent("second"), "--config", &bad]);
    let asked = asking.stop();
    assert_eq!(outcomes(&rows), ["failed"]);
    assert!(said.contains("192.0.2.1") && said.contains("the previous agent serves again"), "{said}");
    assert_eq!(one.digests(), digests);
    assert!(!one.on("cat /etc/xdp-imds/config.yaml").contains("192.0.2.1"), "the configuration is back");
    assert_eq!(asked.failures, Vec::<String>::new(), "of {} requests", asked.answered);
}

#[test]
fn the_host_of_a_package_is_refused_with_the_way_to_go_on() {
    if !privileged::or_skip_for(hypervisor::missing().as_deref()) {
        return;
    }
    let site = Site::new(1);
    site.hypervisors[0].on("printf '/.\\n/usr/bin/xdp-imds\\n' > /var/lib/dpkg/info/xdp-imds.list && \
         printf 'Package: xdp-imds\\nStatus: install ok installed\\nMaintainer: m\\nArchitecture: amd64\\n\
         Version: 0.1.0-1\\nDescription: d\\n\\n' >> /var/lib/dpkg/status");
    for words in [&["load", "--agent", &site.agent("first")][..], &["unload"]] {
        let (_, said) = site.fails(words);
        assert!(said.contains("apt-get install") && said.contains("apt-get purge"), "{words:?}: {said}");
        assert!(PLACES.iter().all(|place| !site.hypervisors[0].present().contains(place)), "{words:?}");
    }
}
