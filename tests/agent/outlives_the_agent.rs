//! After the agent is killed, crashes or stops, its ports stay closed and the guests' other traffic continues. The next
//! agent answers the requests that the previous agent could not.

mod checking;
mod formats;
mod node;
mod release;
mod snapshot;

use anyhow::{Result, ensure};
use aya::maps::{Array, Map, MapData, MapInfo};
use aya::programs::links::PinnedLink;
use aya::programs::{loaded_links, loaded_programs};
use metadata_common::maps::name;
use std::collections::HashSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::agent::{self, Agent, Metrics};
use support::answers::{self, PATHS};
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host;
use support::privileged;
use support::record::Identity;
use support::tap::Shape;
use support::tap_client::storm;

use node::{Node, PATH, PATIENCE, REQUEST, broadcast_listener, fetch_own, metadata_frames};

#[test]
fn no_frame_for_the_metadata_address_leaves_a_tap_after_its_agent_was_killed() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let server = node.host.server(7).expect("a server");
    let agent = node.agent();
    fetch_own(&guest).expect("an answer before the kill");
    agent.kill().expect("killed");
    let ear = broadcast_listener(&node.host);
    for (way, words) in [
        ("over IPv4", "169.254.169.254/32 dev eth0"),
        ("through the gateway", "169.254.169.254/32 via 10.0.2.2"),
    ] {
        guest.ns().ip(&format!("route replace {words}")).expect("a route");
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
        let _ = guest.ping(METADATA, 3);
        assert_eq!(metadata_frames(&ear), 0, "{way}");
    }
    guest.echo(server.address(), 100_000).expect("other traffic continues");
    assert_eq!(guest.ping(host::ADDRESS, 20).expect("ping"), 20);
    let agent = node.agent();
    eventually(PATIENCE, || fetch_own(&guest)).unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log()));
}

/// Waits until the agent's counters stop changing, because a reading is not atomic. Returns the counters.
fn settled(agent: &Agent<'_>) -> Result<Metrics> {
    let mut last = agent.metrics()?;
    eventually(PATIENCE, || {
        let former = std::mem::replace(&mut last, agent.metrics()?);
        for verdict in ["steer_", "socket_"] {
            ensure!(last.frames(verdict)? == former.frames(verdict)?, "{verdict} still changes");
        }
        Ok(())
    })?;
    Ok(last)
}

#[test]
fn frames_steered_to_a_killed_agent_are_dropped_at_its_hub() {
    if !privileged::or_skip() {
        return;
    }
    for steer in ["xdp", "tcx"] {
        let identity = Identity::of(0);
        let node = Node::new(std::slice::from_ref(&identity));
        let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
        let mut words = agent::arguments_with_pins(node.records.path(), &node.ports, &node.bpffs.pins());
        words.extend(["--steer".into(), steer.into()]);
        let binary = agent::binary().expect("the agent is built");
        let agent = Agent::start_binary(&binary, node.host.ns(), words).expect("an agent");
        fetch_own(&guest).expect("an answer before the kill");
        let before = settled(&agent).expect("metrics");
        agent.kill().expect("killed");
        let links = node.host.ns().ip("-o link").expect("the list of links");
        assert!(links.contains("imds-in"), "the test needs the veth to outlive its agent: {links}");
        guest.fetch(PATH, Duration::from_secs(3)).expect_err("no agent answers");
        // A retransmission while the next agent recreates its hub would not reach a hub.
        guest.ns().ip("link set eth0 down").expect("a silent guest");
        let agent = node.agent();
        let after = agent.metrics().expect("metrics");
        let more =
            |verdict| after.frames(verdict).expect("a count") - before.frames(verdict).expect("a count");
        // The last segment of the guest's first connection may have reached the agent before the kill.
        let (steered, ended, delivered) =
            (more("steer_"), more("socket_drop_absent"), more("socket_delivered"));
        assert!(
            ended > 0 && ended + delivered >= steered,
            "{steer}: {steered} steered, {ended} dropped at the hub, {delivered} delivered"
        );
    }
}

#[test]
fn a_request_sent_while_no_agent_runs_is_answered_by_the_next() {
    if !privileged::or_skip() {
        return;
    }
    // The next agent may read records in any order. With two guests the test detects that it assigns slots anew.
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let [first, second] =
        identities.each_ref().map(|identity| Guest::boot(&node.host, &Spec::of(identity)).expect("a guest"));
    let agent = node.agent();
    fetch_own(&first).expect("an answer before the kill");
    fetch_own(&second).expect("an answer before the kill");
    agent.kill().expect("killed");
    // The kernel programs answer the handshake without an agent.
    let address = SocketAddr::from((METADATA, 80));
    let mut connection =
        second.ns().run_in(|| TcpStream::connect_timeout(&address, REQUEST)).expect("connected");
    write!(connection, "GET {PATH} HTTP/1.1\r\nHost: {METADATA}\r\nConnection: close\r\n\r\n").expect("sent");
    let sent = Instant::now();
    connection.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).expect_err("no agent answers yet");
    let agent = node.agent();
    // The guest's TCP doubles its pauses: it sends again within the time that has passed.
    connection.set_read_timeout(Some(PATIENCE + sent.elapsed())).expect("a timeout");
    let read = connection.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    read.unwrap_or_else(|error| panic!("{error} after {text:?}\n{}", agent.log()));
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body).expect("an answer");
    answers::check(&identities[1], PATH, 200, body.as_bytes()).expect("the guest's own user-data");
}

/// Each load of an object overwrites this table, which all programs of a node share.
#[test]
fn programs_keep_passing_ordinary_frames_whatever_agents_load() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let table = || {
        let map = MapData::from_pin(node.bpffs.pins().join("v1/maps").join(name::pin(name::ORDINARY)));
        let map: Array<_, [u8; 256]> = Map::Array(map.expect("a pinned map")).try_into().expect("a table");
        map.get(&0, 0).expect("its entry")
    };
    let guest = Guest::boot(&node.host, &Spec::of(&identities[0])).expect("a guest");
    let first = node.agent();
    let ordinary = table();
    assert_eq!((ordinary[254], ordinary[77]), (0, 1), "169.254.169.254 is served");
    let _other = Guest::boot(&node.host, &Spec::of(&identities[1])).expect("a guest");
    eventually(PATIENCE, || fetch_own(&guest)).expect("an answer");
    assert_eq!(table(), ordinary, "after another port");
    first.kill().expect("killed");
    assert_eq!(table(), ordinary, "without an agent");
    let _next = node.agent();
    assert_eq!(table(), ordinary, "after a restart");
}

#[test]
fn an_inherited_guest_is_answered_before_its_port_is_attached() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0)];
    let node = Node::new(&identities);
    let guest = Guest::boot(&node.host, &Spec::of(&identities[0])).expect("a guest");
    node.agent().kill().expect("killed");
    // The test holds the program on the device, and the next agent finds a directory under the link's name.
    let links = node.bpffs.port_links();
    let [link] = &links[..] else { panic!("one link: {links:?}") };
    let pin = node.bpffs.pins().join("v1/links").join(link);
    let _held = PinnedLink::from_pin(&pin).expect("a link");
    std::fs::remove_file(&pin).expect("removed");
    std::fs::create_dir(&pin).expect("a directory in its place");
    let agent = node.agent();
    eventually(PATIENCE, || fetch_own(&guest)).expect("answered");
    let metrics = agent.metrics().expect("metrics");
    let attached = metrics.samples().iter().find(|sample| sample.name == "xdp_imds_ports");
    assert_eq!(
        attached.map(|sample| sample.value),
        Some(0.0),
        "the test needs a port that cannot be attached"
    );
    std::fs::remove_dir(&pin).expect("removed");
}

#[test]
fn a_port_is_released_when_its_record_was_removed_while_no_agent_ran() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0), Identity::of(1)];
    let mut node = Node::new(&identities);
    let guests =
        identities.each_ref().map(|identity| Guest::boot(&node.host, &Spec::of(identity)).expect("a guest"));
    node.agent().kill().expect("killed");
    assert_eq!(node.bpffs.port_links().len(), 2);
    std::fs::remove_file(identities[1].path(node.records.path())).expect("removed");
    node.ports.truncate(1);
    let _agent = node.agent();
    eventually(PATIENCE, || {
        ensure!(node.bpffs.port_links().len() == 1, "{:?}", node.bpffs.port_links());
        Ok(())
    })
    .expect("the pin is removed");
    fetch_own(&guests[0]).expect("an answer to the remaining guest");
}

#[test]
fn the_pin_of_a_tap_deleted_while_no_agent_ran_is_removed() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let stays = Guest::boot(&node.host, &Spec::of(&identities[0])).expect("a guest");
    let goes = Guest::boot(&node.host, &Spec::of(&identities[1])).expect("a guest");
    node.agent().kill().expect("killed");
    drop(goes);
    let agent = node.agent();
    eventually(PATIENCE, || {
        ensure!(node.bpffs.port_links().len() == 1, "{:?}\n{}", node.bpffs.port_links(), agent.log());
        Ok(())
    })
    .expect("the pin is removed");
    fetch_own(&stays).expect("an answer to the remaining guest");
    let comes = Guest::boot(&node.host, &Spec::of(&identities[1])).expect("a guest");
    eventually(PATIENCE, || fetch_own(&comes)).expect("an answer to the new guest");
}

/// The numbers of links, programs and maps that this node's agents have in the kernel.
fn objects(bpffs: &Bpffs) -> Result<[usize; 3]> {
    let pinned = std::fs::read_dir(bpffs.pins().join("v1/maps"))?;
    let pinned: HashSet<u32> =
        pinned.map(|map| Ok(MapInfo::from_pin(map?.path())?.id())).collect::<Result<_>>()?;
    let (mut programs, mut maps) = (HashSet::new(), HashSet::new());
    // Objects of other tests may appear and vanish meanwhile.
    for program in loaded_programs().flatten() {
        let Ok(Some(used)) = program.map_ids() else { continue };
        if used.iter().any(|map| pinned.contains(map)) {
            programs.insert(program.id());
            maps.extend(used);
        }
    }
    let links = loaded_links().flatten().filter(|link| programs.contains(&link.program_id())).count();
    Ok([links, programs.len(), maps.len()])
}

#[test]
fn twenty_crashes_disturb_no_other_traffic_and_leak_no_kernel_object() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let server = node.host.server(7).expect("a server");
    let over = AtomicBool::new(false);
    let counts = std::thread::scope(|scope| {
        let pinging = scope.spawn(|| {
            let mut lost = 0;
            while !over.load(Ordering::Relaxed) {
                lost += 50 - guest.ping(host::ADDRESS, 50).expect("ping");
            }
            lost
        });
        let streaming = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                guest.echo(server.address(), 1 << 20)?;
            }
            Ok::<_, anyhow::Error>(())
        });
        // The kernel frees the programs of a dead process with some delay.
        let first = (|| {
            node.agent().kill()?;
            std::thread::sleep(Duration::from_secs(2));
            objects(&node.bpffs)
        })();
        let crash = |first: &[usize; 3]| {
            node.agent().kill()?;
            eventually(PATIENCE, || {
                let now = objects(&node.bpffs)?;
                ensure!(now == *first, "{now:?} now, {first:?} after the first crash");
                Ok(())
            })
        };
        let counts = first.and_then(|first| (1..20).try_for_each(|_| crash(&first)).map(|()| first));
        over.store(true, Ordering::Relaxed);
        assert_eq!(pinging.join().expect("no panic"), 0, "pings lost");
        streaming.join().expect("no panic").expect("the stream does not break");
        counts
    });
    let counts = counts.expect("the same after each of twenty crashes");
    eprintln!("links, programs and maps after a crash: {counts:?}");
    assert!(counts[0] >= 1, "{counts:?}");
    let _agent = node.agent();
    fetch_own(&guest).expect("an answer after the last crash");
}

#[test]
fn all_guests_that_boot_while_their_agent_is_killed_complete_their_boot() {
    if !privileged::or_skip() {
        return;
    }
    const GUESTS: u16 = 64;
    let identities: Vec<Identity> =
        (0..GUESTS).map(|number| Identity::of(number).with_user_data_of(4_000)).collect();
    let mut node = Node::new(&identities);
    let taps = node.host.rack(&identities, Shape::default()).expect("taps");
    let agent = node.agent();
    let paths: Vec<&str> = PATHS.iter().copied().cycle().take(40).collect();
    let mut booting: Vec<_> = identities.iter().cloned().zip(taps).collect();
    let retries = std::thread::scope(|scope| {
        let guests = scope.spawn(|| {
            // A failed request is retried ten times, as cloud-init does.
            for retry in 0..10 {
                let outcomes = storm(std::mem::take(&mut booting), &paths, Duration::from_secs(20));
                for outcome in outcomes {
                    let checked = outcome.answers.and_then(|all| {
                        all.iter().try_for_each(|one| {
                            answers::check(&outcome.identity, &one.path, one.status, &one.body)
                        })
                    });
                    if checked.is_err() {
                        let tap = node.host.tap_of(&outcome.identity).expect("its tap");
                        booting.push((outcome.identity, tap));
                    }
                }
                if booting.is_empty() {
                    return Some(retry);
                }
            }
            None
        });
        std::thread::sleep(Duration::from_millis(50));
        let before = agent.metrics().and_then(|metrics| metrics.frames("steer_ipv4_tcp")).expect("metrics");
        agent.kill().expect("killed");
        let agent = node.agent();
        let retries = guests.join().expect("no panic");
        let after = agent.metrics().and_then(|metrics| metrics.frames("steer_ipv4_tcp")).expect("metrics");
        eprintln!("frames steered before the kill: {before}, at the end: {after}");
        let all = u64::from(GUESTS) * 40;
        assert!(before < all && after >= all, "{before} frames steered before the kill, {after} at the end");
        retries
    });
    eprintln!("retries: {retries:?}");
    assert!(retries.is_some(), "{} guests never completed", booting.len());
}
