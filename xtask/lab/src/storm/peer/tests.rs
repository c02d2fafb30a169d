//! Tests that peers give each guest its own answers.

use bytes::Bytes;
use metadata_common::mac::Mac;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use support::guest::METADATA;
use support::netns::Namespace;
use support::privileged;

use super::{ASKING, Haproxy, OWN_MAC, PEERS, PeerPage, Scene, Subject as _, Tenant, named, shares};

const GUESTS: u8 = 5;

fn page(method: &str, path: &str, status: u16, body: impl Into<Bytes>) -> PeerPage {
    PeerPage {
        method: method.into(),
        path: path.into(),
        status,
        content_type: "text/plain".into(),
        body: body.into(),
    }
}

/// Paths as the dialects have them: with and without a slash at the end, absent ones, and the PUT of a token.
fn tenants() -> Vec<Tenant> {
    let tenant = |number: u8| Tenant {
        tap: format!("stormtap{number}"),
        mac: Mac([0x52, 0x54, 0, 0x69, 1, number]),
        address: Ipv4Addr::new(10, 0, 16, number),
        pages: vec![
            page(
                "GET",
                "/v1/user-data",
                200,
                format!("#cloud-config\n# \"{number}\" $host \\\n{}", "x".repeat(40_000)),
            ),
            page("GET", "/v1/vendor-data", 204, ""),
            page("GET", "/openstack/latest/vendor_data2.json", 404, "no \"such\" document\n"),
            page("PUT", "/latest/api/token", 200, "a-token"),
            page("GET", "/latest/meta-data/", 200, format!("hostname\ninstance-{number}")),
            page("GET", "/latest/meta-data", 200, "hostname\n"),
            page("GET", "/latest/meta-data/hostname", 200, format!("guest-{number}\0{}", '\u{e9}')),
            page("GET", "/latest/meta-data/empty", 200, ""),
            page("GET", "/latest/meta-data/empty", 200, ""),
            page("GET", "/latest/meta-data/macs/{mac}/", 200, "device-number\n"),
            page("GET", "/latest/meta-data/macs/{mac}/device-number", 200, "0"),
            page("GET", "/latest/meta-data/macs/{mac}/local-ipv4s", 200, format!("10.0.16.{number}")),
        ],
    };
    (1..=GUESTS).map(tenant).collect()
}

/// Makes a node and the guests, each guest as a namespace behind a veth pair instead of a tap.
fn rack(tenants: &[Tenant]) -> (Namespace, Vec<Namespace>) {
    let node = Namespace::new("storm-peers").expect("a node");
    let guests = tenants.iter().map(|tenant| {
        let guest = Namespace::new("storm-peer-guest").expect("a guest");
        let Tenant { tap, mac, address, .. } = tenant;
        node.ip(&format!("link add {tap} type veth peer name eth0 address {mac} netns {}", guest.name()))
            .expect("a cable");
        guest
            .ip_batch(&format!(
                "link set eth0 up\naddr add {address}/32 dev eth0\nroute add {METADATA} dev eth0\n"
            ))
            .expect("its address");
        guest
    });
    let guests = guests.collect();
    (node, guests)
}

fn ask(guest: &Namespace, tenant: &Tenant, page: &PeerPage) -> (u16, Vec<u8>) {
    let url = format!("http://{METADATA}{}", page.path.replace(OWN_MAC, &tenant.mac.to_string()));
    let mut curl = Command::new("curl");
    curl.args(["-s", "-m", "10", "--path-as-is", "-w", "%{stderr}%{http_code}", "-X", &page.method, &url]);
    let output = guest.output(&mut curl).expect("curl");
    (String::from_utf8_lossy(&output.stderr).trim().parse().unwrap_or(0), output.stdout)
}

fn every_guest_gets_its_own(tenants: &[Tenant], guests: &[Namespace], peer: &str) {
    for (tenant, guest) in tenants.iter().zip(guests) {
        // A booting guest knows no MAC yet.
        guest.ip("neigh flush all").expect("a fresh start");
        for page in &tenant.pages {
            let (status, body) = ask(guest, tenant, page);
            let what = format!("{peer}, {}: {} {}", tenant.tap, page.method, page.path);
            assert_eq!(status, page.status, "{what}");
            assert!(body == page.body, "{what}: {:?}", String::from_utf8_lossy(&body));
        }
    }
}

fn may_run() -> bool {
    let peers = shell::tools::missing_peers();
    privileged::or_skip_for(privileged::missing().or(peers.as_deref()))
}

#[privileged::test(may_run)]
fn all_peers_in_turn_answer_each_guest_with_its_own_bytes() {
    shell::tools::ensure(shell::tools::LAB).expect("programs");
    let tenants = tenants();
    let (node, guests) = rack(&tenants);
    let scene = Scene { node: &node, tenants: &tenants, cores: 2, pinned: Some(&[0]) };
    // Neutron's agent has bodies of its own for errors; `tests/storm.rs` runs it.
    let names = PEERS.iter().filter(|name| !ASKING.contains(name));
    let mut peers: Vec<_> = names.filter_map(|name| named(name, 2, None)).collect();
    assert_eq!(peers.len(), 2, "all but the one whose program the user names");
    for peer in &mut peers {
        peer.prepare(&scene).expect("a peer that can be prepared");
    }
    // Each peer runs twice, because a storm alternates them.
    for peer in peers.iter().chain(&peers) {
        let running = peer.start(&scene).expect("a peer that starts");
        let pids = running.pids();
        every_guest_gets_its_own(&tenants, &guests, peer.name());
        running.stop().expect("a peer that ends");
        let alive: Vec<_> = pids.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).collect();
        assert!(alive.is_empty(), "{}: of {pids:?} {alive:?} are still running", peer.name());
        let links = node.ip("-o link show").expect("links");
        assert!(!links.contains("stormbr") && !links.contains("stormup"), "{}: {links}", peer.name());
    }
}

#[privileged::test(may_run)]
fn a_peer_that_is_dropped_ends_and_frees_the_taps() {
    let tenants = tenants();
    let (node, _guests) = rack(&tenants);
    let scene = Scene { node: &node, tenants: &tenants, cores: 2, pinned: None };
    let mut peer = Haproxy::new(3);
    peer.prepare(&scene).expect("a prepared peer");
    let running = peer.start(&scene).expect("a running peer");
    let pids = running.pids();
    assert_eq!(pids.len(), 3, "{pids:?}");
    drop(running);
    assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()), "{pids:?}");
    let links = node.ip("-o link show").expect("links");
    assert!(links.contains("stormtap1") && !links.contains("stormbr"), "{links}");
}

#[test]
fn pages_that_a_peer_cannot_serve_are_refused_before_the_start() {
    let of = |pages: Vec<PeerPage>| Tenant { pages, ..tenants().swap_remove(0) };
    let good = || vec![page("GET", "/a", 200, "a"), page("GET", "/b", 404, "none")];
    let cases: Vec<(&str, [Tenant; 2], &str)> = vec![
        (
            "no guest has the second page",
            [of(good()), of(good()[..1].to_vec())],
            "/b: the answer of stormtap1 differs",
        ),
        (
            "another status",
            [of(good()), of(vec![page("GET", "/a", 404, "a"), good().remove(1)])],
            "/a: the answer of stormtap1",
        ),
        (
            "an error of its own",
            [of(good()), of(vec![good().remove(0), page("GET", "/b", 404, "other")])],
            "own body",
        ),
        (
            "a path that would end a word",
            [of(vec![page("GET", "/a b", 200, "")]), of(vec![page("GET", "/a b", 200, "")])],
            "cannot be written",
        ),
        (
            "one path, two methods",
            [of(vec![page("GET", "/a", 200, ""), page("PUT", "/a", 200, "")]), of(good())],
            "two different answers",
        ),
    ];
    for (name, tenants, says) in cases {
        let error =
            super::PeerSite::lay_out(&tenants).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(says), "{name}: {error}");
    }
    assert!(super::PeerSite::lay_out(&[]).is_err());
}

#[test]
fn every_guest_is_on_one_network_and_shares_are_equal_within_one() {
    for (guests, networks) in [(1, 1), (7, 3), (1_000, 8), (4_000, 8), (3, 8), (0, 1)] {
        let shares = shares(guests, networks).expect("shares");
        let all: Vec<usize> = shares.iter().cloned().flatten().collect();
        assert_eq!(all, (0..guests).collect::<Vec<_>>(), "{guests} on {networks}");
        let sizes = || shares.iter().map(ExactSizeIterator::len);
        assert!(sizes().max().unwrap_or(0) - sizes().min().unwrap_or(0) <= 1, "{shares:?}");
    }
}

#[test]
fn too_many_guests_for_the_bridges_are_refused_with_a_remedy() {
    assert!(shares(1_000, 1).is_ok());
    let error = shares(4_000, 3).expect_err("a refusal").to_string();
    assert!(error.contains("4 networks"), "{error}");
    assert!(shares(10, 0).is_err());
}
