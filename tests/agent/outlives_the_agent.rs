//! After the agent is killed, crashes or stops, its ports stay closed and the guests' other traffic continues. The next
//! agent answers the requests that the previous agent could not.

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData, MapInfo};
use aya::programs::links::PinnedLink;
use aya::programs::{loaded_links, loaded_programs};
use metadata_common::maps::name;
use metadata_control::status::AgentStatus;
use metadata_steer::CHECK_EVERY;
use std::collections::HashSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::agent::{Agent, Metrics, PortArgument};
use support::answers::PATHS;
use support::bpffs::Bpffs;
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::objects::Objects;
use support::record::Identity;
use support::tap::{Shape, Tap};
use support::tap_client::storm;
use support::{agent, answers, host, objects, privileged};
use tempfile::TempDir;

#[privileged::test]
fn no_frame_for_the_metadata_address_leaves_a_tap_after_its_agent_was_killed() {
    let (node, [guest]) = Node::with_guests();
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

#[privileged::test]
fn frames_steered_to_a_killed_agent_are_dropped_at_its_hub() {
    for steer in ["xdp", "tcx"] {
        let (node, [guest]) = Node::with_guests();
        let agent = node.try_agent(node.records.path(), &["--steer", steer]).expect("an agent");
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

#[privileged::test]
fn a_request_sent_while_no_agent_runs_is_answered_by_the_next() {
    // The next agent may read records in any order. With two guests the test detects that it assigns slots anew.
    let (node, [first, second]) = Node::with_guests();
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
    answers::check(&Identity::of(1), PATH, 200, body.as_bytes()).expect("the guest's own user-data");
}

/// Each load of an object overwrites this table, which all programs of a node share.
#[privileged::test]
fn programs_keep_passing_ordinary_frames_whatever_agents_load() {
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let table = || {
        let map = MapData::from_pin(node.bpffs.pins().join("v1/maps").join(name::pin(name::ORDINARY)));
        let map: Array<_, [u8; 256]> = Map::Array(map.expect("a pinned map")).try_into().expect("a table");
        map.get(&0, 0).expect("its entry")
    };
    let guest = node.boot(&identities[0]);
    let first = node.agent();
    let ordinary = table();
    assert_eq!((ordinary[254], ordinary[77]), (0, 1), "169.254.169.254 is served");
    let _other = node.boot(&identities[1]);
    eventually(PATIENCE, || fetch_own(&guest)).expect("an answer");
    assert_eq!(table(), ordinary, "after another port");
    first.kill().expect("killed");
    assert_eq!(table(), ordinary, "without an agent");
    let _next = node.agent();
    assert_eq!(table(), ordinary, "after a restart");
}

#[privileged::test]
fn an_inherited_guest_is_answered_before_its_port_is_attached() {
    let (node, [guest]) = Node::with_guests();
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

#[privileged::test]
fn a_port_is_released_when_its_record_was_removed_while_no_agent_ran() {
    let (mut node, guests) = Node::with_guests::<2>();
    node.agent().kill().expect("killed");
    assert_eq!(node.bpffs.port_links().len(), 2);
    std::fs::remove_file(Identity::of(1).path(node.records.path())).expect("removed");
    node.ports.truncate(1);
    let _agent = node.agent();
    eventually(PATIENCE, || {
        ensure!(node.bpffs.port_links().len() == 1, "{:?}", node.bpffs.port_links());
        Ok(())
    })
    .expect("the pin is removed");
    fetch_own(&guests[0]).expect("an answer to the remaining guest");
}

#[privileged::test]
fn the_pin_of_a_tap_deleted_while_no_agent_ran_is_removed() {
    let (node, [stays, goes]) = Node::with_guests();
    node.agent().kill().expect("killed");
    drop(goes);
    let agent = node.agent();
    eventually(PATIENCE, || {
        ensure!(node.bpffs.port_links().len() == 1, "{:?}\n{}", node.bpffs.port_links(), agent.log());
        Ok(())
    })
    .expect("the pin is removed");
    fetch_own(&stays).expect("an answer to the remaining guest");
    let comes = node.boot(&Identity::of(1));
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

#[privileged::test]
fn twenty_crashes_disturb_no_other_traffic_and_leak_no_kernel_object() {
    let (node, [guest]) = Node::with_guests();
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

#[privileged::test]
fn all_guests_that_boot_while_their_agent_is_killed_complete_their_boot() {
    const GUESTS: u16 = 64;
    /// So many that they are not over before the first of them are seen.
    const REQUESTS: usize = 400;
    let identities: Vec<Identity> =
        (0..GUESTS).map(|number| Identity::of(number).with_user_data_of(4_000)).collect();
    let mut node = Node::new(&identities);
    let taps = node.host.rack(&identities, Shape::default()).expect("taps");
    let agent = node.agent();
    let paths: Vec<&str> = PATHS.iter().copied().cycle().take(REQUESTS).collect();
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
        let steered = || agent.metrics().and_then(|metrics| metrics.frames("steer_ipv4_tcp"));
        let before = eventually(Duration::from_secs(20), || {
            steered().ok().filter(|frames| *frames > 0).context("none yet")
        });
        let before = before.expect("guests ask");
        agent.kill().expect("killed");
        let agent = node.agent();
        let retries = guests.join().expect("no panic");
        let after = agent.metrics().and_then(|metrics| metrics.frames("steer_ipv4_tcp")).expect("metrics");
        eprintln!("frames steered before the kill: {before}, at the end: {after}");
        let all = u64::from(GUESTS) * REQUESTS as u64;
        assert!(before < all && after >= all, "{before} frames steered before the kill, {after} at the end");
        retries
    });
    eprintln!("retries: {retries:?}");
    assert!(retries.is_some(), "{} guests never completed", booting.len());
}

// A node whose agents come and go, and what its guests see.

/// Time limit of one request.
const REQUEST: Duration = Duration::from_secs(5);
/// Longest wait for something that must happen; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);
const PATH: &str = "/v1/user-data";

/// A node with agents that share one directory of pins.
struct Node {
    host: Host,
    records: TempDir,
    bpffs: Bpffs,
    ports: Vec<PortArgument>,
}

impl Node {
    fn new(identities: &[Identity]) -> Self {
        let records = tempfile::tempdir().expect("a directory");
        for identity in identities {
            identity.write(records.path(), 1).expect("a record");
        }
        let port = |identity: &Identity| PortArgument::new(Host::tap_name(identity), identity.mac);
        Self {
            host: Host::new().expect("a node"),
            records,
            bpffs: Bpffs::mount().expect("a bpffs"),
            ports: identities.iter().map(port).collect(),
        }
    }

    /// A node with the records of these guests, which have booted.
    fn with_guests<const N: usize>() -> (Self, [Guest; N]) {
        let identities: [_; N] = std::array::from_fn(|number| Identity::of(number as u16));
        let node = Self::new(&identities);
        let guests = identities.each_ref().map(|identity| node.boot(identity));
        (node, guests)
    }

    fn boot(&self, identity: &Identity) -> Guest {
        Guest::boot(&self.host, &Spec::of(identity)).expect("a guest")
    }

    fn agent(&self) -> Agent<'_> {
        self.agent_for(self.records.path())
    }

    /// Starts an agent for the records in `records`; state and sockets stay in the node's directory.
    fn agent_for(&self, records: &Path) -> Agent<'_> {
        self.try_agent(records, &[]).expect("an agent")
    }

    /// Like [`Node::agent_for`], with more arguments, for an agent that may refuse to start.
    fn try_agent(&self, records: &Path, more: &[&str]) -> Result<Agent<'_>> {
        let mut words = agent::arguments_with_pins(self.records.path(), &self.ports, &self.bpffs.pins());
        let given = words.iter().position(|word| word == "--records").expect("it is given");
        words[given + 1] = records.into();
        words.extend(more.iter().map(Into::into));
        Agent::start_binary(&agent::binary()?, self.host.ns(), words)
    }

    fn release(&self, more: &[&str]) -> Output {
        let pins = self.bpffs.pins();
        self.release_of("--pins", &pins, more)
    }

    /// Releases the pins that `option` and `path` name.
    fn release_of(&self, option: &str, path: &Path, more: &[&str]) -> Output {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.arg("release").arg(option).arg(path).args(more);
        self.host.ns().output(&mut command).expect("it runs")
    }
}

/// Adds another station to the bridge. It receives broadcasts.
fn broadcast_listener(host: &Host) -> Tap {
    let tap = Tap::create(host.ns(), "ear", Shape::default()).expect("a tap");
    host.ns().ip(&format!("link set ear master {} up", host::BRIDGE)).expect("on the bridge");
    tap
}

/// The number of frames a tap has received that contain the metadata address.
fn metadata_frames(tap: &Tap) -> usize {
    let mut buffer = [0; 2048];
    let mut frames = 0;
    while let Some(len) = tap.receive(0, &mut buffer).expect("the tap is there") {
        frames += usize::from(buffer[..len].windows(4).any(|bytes| bytes == METADATA.octets()));
    }
    frames
}

fn fetch_own(guest: &Guest) -> Result<()> {
    guest.fetch_own(PATH, REQUEST).map(drop)
}

// What another program detaches or removes is noticed, restored and reported by the running agent.

fn troubles(node: &Node) -> Result<Vec<String>> {
    let mut command = Command::new(agent::binary()?);
    command.args(["status", "--json", "--run"]).arg(node.records.path().join("run"));
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let status: AgentStatus = serde_json::from_str(&text).with_context(|| text.clone())?;
    Ok(status.troubles)
}

/// Makes the agent compare at once, and waits until a line of `status` has these words, or until it is healthy.
fn compares(node: &Node, agent: &mut Agent<'_>, words: Option<&str>) {
    agent.reload().expect("SIGHUP");
    says(node, agent, words, PATIENCE);
}

/// Waits until a line of `status` has these words, or until it is healthy.
fn says(node: &Node, agent: &Agent<'_>, words: Option<&str>, patience: Duration) {
    let seen = || {
        let lines = troubles(node)?;
        let is_so = words.map_or(lines.is_empty(), |words| lines.iter().any(|line| line.contains(words)));
        ensure!(is_so, "expected {words:?}, found {lines:?}");
        Ok(())
    };
    eventually(patience, seen).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
}

#[privileged::test]
fn guests_are_answered_again_after_somebody_detached_every_program() {
    let (node, [guest]) = Node::with_guests();
    let mut agent = node.agent();
    fetch_own(&guest).expect("an answer");
    let held = Objects::held_by(agent.pid()).expect("its links");
    assert!(held.links.len() >= 3, "a port's link and those of the hub: {held}");
    for link in &held.links {
        objects::detach(*link).expect("detached");
    }
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("no program is attached");
    compares(&node, &mut agent, Some("detached by another program"));
    eventually(PATIENCE, || fetch_own(&guest)).expect("answered again, without a restart");
    let text = agent.ask("/metrics").expect("metrics").1;
    let faults =
        text.lines().find(|line| line.starts_with("xdp_imds_attachment_faults_total{fault=\"detached\"}"));
    assert!(faults.is_some_and(|line| !line.ends_with(" 0")), "{faults:?}");
    compares(&node, &mut agent, None);
}

#[privileged::test]
fn removed_pins_are_back_so_that_a_killed_agent_leaves_taps_closed() {
    let (node, [guest]) = Node::with_guests();
    let mut agent = node.agent();
    fetch_own(&guest).expect("an answer");
    let links = node.bpffs.links();
    std::fs::remove_dir_all(node.bpffs.pins()).expect("removed");
    compares(&node, &mut agent, Some("pins were removed"));
    assert_eq!(node.bpffs.links(), links);
    compares(&node, &mut agent, None);
    agent.kill().expect("killed");
    let ear = broadcast_listener(&node.host);
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
    assert_eq!(metadata_frames(&ear), 0, "the tap is closed");
    let _agent = node.agent();
    eventually(PATIENCE, || fetch_own(&guest)).expect("the next agent inherits the pins");
}

#[privileged::test]
fn a_second_bpffs_over_the_pins_is_reported_until_it_is_gone() {
    let (node, [guest]) = Node::with_guests();
    let mut agent = node.agent();
    node.bpffs.cover().expect("a second bpffs");
    compares(&node, &mut agent, Some("mounted over it"));
    fetch_own(&guest).expect("guests are served");
    node.bpffs.uncover().expect("unmounted");
    compares(&node, &mut agent, None);
    assert!(!node.bpffs.links().is_empty());
}

#[privileged::test]
fn a_second_bpffs_that_only_the_next_agent_would_see_is_reported() {
    let node = Node::new(&[Identity::of(0)]);
    let by_init = std::fs::read_to_string("/proc/1/mountinfo").expect("the mounts of process 1");
    if !by_init.contains(&node.bpffs.path().display().to_string()) {
        eprintln!("skipped: process 1 has other mounts than this test");
        return;
    }
    // As under a unit whose mounts are its own.
    let mut words: Vec<_> = ["--mount", "--propagation", "private"].map(Into::into).into();
    words.push(agent::binary().expect("the agent is built").into());
    words.extend(agent::arguments_with_pins(node.records.path(), &node.ports, &node.bpffs.pins()));
    let agent = Agent::start_binary(Path::new("unshare"), node.host.ns(), words).expect("an agent");
    says_soon(&node, &agent, None);
    node.bpffs.cover().expect("a second bpffs");
    says_soon(&node, &agent, Some("process 1"));
    node.bpffs.uncover().expect("unmounted");
    says_soon(&node, &agent, None);
}

#[privileged::test]
fn a_change_of_the_pins_is_said_before_the_next_comparison_is_due() {
    let node = Node::new(&[Identity::of(0)]);
    let mut agent = node.agent();
    let links = node.bpffs.links();
    let released = node.release(&["--force"]);
    assert!(released.status.success(), "{released:?}");
    says_soon(&node, &agent, Some("release --force"));
    compares(&node, &mut agent, None);
    for round in ["the directories of the first", "those that were made again"] {
        std::fs::remove_dir_all(node.bpffs.pins()).expect("removed");
        says_soon(&node, &agent, Some("removed or replaced by another program"));
        assert_eq!(node.bpffs.links(), links, "{round}");
        compares(&node, &mut agent, None);
    }
    node.bpffs.cover().expect("a second bpffs");
    says_soon(&node, &agent, Some("mounted over it"));
    node.bpffs.uncover().expect("unmounted");
    says_soon(&node, &agent, None);
}

/// Like [`compares`], without a request to compare, and before the next round is due.
fn says_soon(node: &Node, agent: &Agent<'_>, words: Option<&str>) {
    says(node, agent, words, CHECK_EVERY / 3);
}

// The state directory of another release.

/// The VM in the samples of state files.
const VM: &str = "7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d";

/// Each format of a state file, and the path of a file below the state directory.
fn files() -> [(&'static str, String); 5] {
    [
        ("token.key", "token.key".into()),
        ("mailbox", format!("vms/{VM}.json")),
        ("dialects", "dialects".into()),
        ("instance", "instances/hook-0.json".into()),
        ("records.snapshot", "records.snapshot".into()),
    ]
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(path, bytes).expect("a file");
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).expect("a private file");
}

/// The missing directory of records that the samples of snapshots name.
const AWAY: &str = "/nonexistent/records.d";

#[privileged::test]
fn an_agent_starts_with_the_state_of_every_release() {
    let releases = golden::releases();
    assert!(!releases.is_empty());
    for release in releases {
        let node = Node::new(&[]);
        let state = |file: &str| -> PathBuf { node.records.path().join("state").join(file) };
        for (format, file) in files() {
            write(&state(&file), &golden::of_release(format, &release).bytes);
        }
        let current = |text: &[u8]| -> String {
            let keys: serde_json::Value = serde_json::from_slice(text).expect("token keys");
            keys["current"].as_str().expect("a key").to_owned()
        };
        let key = current(&std::fs::read(state("token.key")).expect("a file of keys"));
        let agent = node.agent_for(Path::new(AWAY));
        assert!(agent.eventually_logs("serving from the snapshot"), "{release}: {}", agent.log());
        assert!(agent.stop().expect("stopped").success(), "{release}");
        // Tokens of that key stay valid. The sample is older than `rotate_token_key_days`, so it may become the former.
        let keys = std::fs::read_to_string(state("token.key")).expect("a file of keys");
        assert!(keys.contains(&key), "{release}: the key is gone from {keys}");
    }
}

#[privileged::test]
fn an_agent_refuses_later_token_keys_and_names_the_remedy() {
    let node = Node::new(&[]);
    let path = node.records.path().join("state/token.key");
    let later = br#"{"form":"xdp-imds token keys 9","keys":[]}"#;
    write(&path, later);
    let error = node.try_agent(Path::new(AWAY), &[]).expect_err("a refusal").to_string();
    for part in ["expected token keys of version 1", "found version 9", "start a release that reads it"] {
        assert!(error.contains(part), "no `{part}` in: {error}");
    }
    assert_eq!(std::fs::read(&path).expect("it stays"), later);
}

// `xdp-imds release` takes away what agents have pinned.

#[privileged::test]
fn release_opens_the_ports_of_an_ended_agent_and_refuses_those_of_a_running_one() {
    let (node, [guest]) = Node::with_guests();
    let release = |code: i32, words: &str| {
        let output = node.release(&[]);
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.code() == Some(code) && said.contains(words), "{said}");
    };
    release(0, "nothing is pinned");
    let agent = node.agent();
    release(4, "stop it first");
    fetch_own(&guest).expect("the guest is still served");
    assert!(agent.stop().expect("stopped").success());

    let ear = broadcast_listener(&node.host);
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
    assert_eq!(metadata_frames(&ear), 0, "a clean stop must leave the port closed");
    release(0, "removed 1 program");
    eventually(PATIENCE, || {
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
        ensure!(metadata_frames(&ear) > 0, "the port is still closed");
        Ok(())
    })
    .expect("the port is open");
}

#[privileged::test]
fn a_takeover_after_an_abandoned_uninstall_serves_old_and_new_guests() {
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let agent = node.agent();
    let old = node.boot(&identities[0]);
    eventually(PATIENCE, || fetch_own(&old)).expect("an answer");
    let released = node.release(&["--force"]);
    let said = String::from_utf8_lossy(&released.stdout).into_owned();
    assert!(released.status.success() && said.contains("an agent runs and keeps the programs"), "{said}");
    assert!(!said.contains("from their devices"), "nothing was detached: {said}");
    fetch_own(&old).expect("it is still served");
    // Nobody deletes the DaemonSet: VMs start, and the next rollout comes within the grace of the release.
    let new = node.boot(&identities[1]);
    eventually(PATIENCE, || fetch_own(&new)).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    let next = node.try_agent(node.records.path(), &["--takeover"]).expect("an agent");
    let (status, log) = agent.ended(PATIENCE).expect("it hands over");
    assert!(status.success(), "{log}");
    for guest in [&old, &new] {
        eventually(PATIENCE, || fetch_own(guest)).unwrap_or_else(|error| panic!("{error:#}\n{}", next.log()));
    }
    assert_eq!(node.bpffs.port_links().len(), 2, "{}", next.log());
    next.kill().expect("killed");
    let ear = broadcast_listener(&node.host);
    for guest in [&old, &new] {
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("no agent answers");
    }
    assert_eq!(metadata_frames(&ear), 0, "its taps are closed");
}

#[privileged::test]
fn release_finds_the_pins_by_run_directory_or_configuration() {
    let node = Node::new(&[]);
    let pins = node.bpffs.pins();
    let run = node.records.path().join("run");
    let file = node.records.path().join("agent.yml.off");
    std::fs::write(&file, format!("pins: {}\n", pins.display())).expect("a file");
    let stderr = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();

    let agent = node.agent();
    for (option, path) in [("--run", &run), ("--config", &file)] {
        let refused = node.release_of(option, path, &[]);
        assert!(!refused.status.success(), "{option}: an agent runs on these pins");
        assert!(stderr(&refused).contains(&pins.display().to_string()), "{option}: {}", stderr(&refused));
    }
    assert!(agent.stop().expect("stopped").success());
    let unanswered = node.release_of("--run", &run, &[]);
    assert!(stderr(&unanswered).contains("--pins"), "{}", stderr(&unanswered));
    let released = node.release_of("--config", &file, &[]);
    assert!(released.status.success(), "{}", stderr(&released));
}

#[privileged::test]
fn the_error_about_a_missing_bpffs_names_both_remedies() {
    let node = Node::new(&[]);
    let elsewhere = tempfile::tempdir().expect("a directory");
    let words = agent::arguments_with_pins(node.records.path(), &[], &elsewhere.path().join("pins"));
    let binary = agent::binary().expect("the agent is built");
    let error = Agent::start_binary(&binary, node.host.ns(), words).expect_err("a refusal").to_string();
    assert!(error.contains("below /sys/fs/bpf") && error.contains("--no-pins"), "{error}");
}

// The snapshot of records, for agents whose directory of records is missing.

/// A directory of records that the test can remove, like a missing mount.
fn removable(records: &Path) -> PathBuf {
    records.join("elsewhere")
}

#[privileged::test]
fn records_are_served_from_the_snapshot_while_their_directory_is_missing() {
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&[]);
    let records = removable(node.records.path());
    std::fs::create_dir(&records).expect("a directory");
    let ports: Vec<_> =
        identities.iter().map(|one| PortArgument::new(Host::tap_name(one), one.mac)).collect();
    let node = Node { ports, ..node };
    for identity in &identities {
        identity.write(&records, 1).expect("a record");
    }
    let [stays, goes] = identities.each_ref().map(|identity| node.boot(identity));
    let agent = node.agent_for(&records);
    fetch_own(&stays).expect("an answer before the kill");
    assert!(agent.stop().expect("stopped").success());

    let hidden = node.records.path().join("hidden");
    std::fs::rename(&records, &hidden).expect("the directory is unavailable");
    let agent = node.agent_for(&records);
    fetch_own(&stays).expect("an answer from the snapshot");
    fetch_own(&goes).expect("an answer from the snapshot");
    let source = |agent: &Agent<'_>, name: &str| -> Result<f64> {
        let metrics = agent.metrics()?;
        let mut samples = metrics.samples().iter();
        let found = samples
            .find(|one| one.name == "xdp_imds_records_source" && one.label("source") == Some(name))
            .context("no such metric")?;
        Ok(found.value)
    };
    assert_eq!(source(&agent, "snapshot").expect("a metric"), 1.0);
    assert!(agent.eventually_logs("serving from the snapshot"), "{}", agent.log());
    assert!(!agent.log().contains(&identities[0].user_data), "a record is in the log");

    // The directory comes back without one record and with a change of the other.
    std::fs::remove_file(identities[1].path(&hidden)).expect("removed");
    let renewed = Identity::of(0).with_user_data_of(3_000);
    renewed.write(&hidden, 2).expect("a record");
    std::fs::rename(&hidden, &records).expect("the directory is back");
    eventually(PATIENCE, || {
        let fetched = stays.fetch(PATH, REQUEST)?;
        answers::check(&renewed, PATH, fetched.status, &fetched.body)
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log()));
    assert_eq!(source(&agent, "source").expect("a metric"), 1.0);
    eventually(PATIENCE, || {
        let fetched = goes.fetch(PATH, REQUEST)?;
        ensure!(fetched.status == 404, "the request still gets status {}", fetched.status);
        Ok(())
    })
    .expect("the missing record is not served");
}

#[privileged::test]
fn a_damaged_snapshot_is_reported_only_when_it_is_needed() {
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = node.boot(&identity);
    assert!(node.agent().stop().expect("stopped").success());
    let snapshot = node.records.path().join("state/records.snapshot");
    let good = std::fs::read(&snapshot).expect("the agent saved it at its end");
    std::fs::write(&snapshot, &good[..good.len() / 2]).expect("damaged");
    // The agent does not read the snapshot while its source is available.
    let agent = node.agent();
    fetch_own(&guest).expect("an answer from the source");
    assert!(agent.stop().expect("stopped").success());
    assert_eq!(std::fs::read(&snapshot).expect("the agent saved it again"), good);
    // Without its source, the agent reports the damage and ends as it does without a snapshot.
    std::fs::write(&snapshot, &good[..good.len() / 2]).expect("damaged");
    let away = node.records.path().join("away");
    let error = node.try_agent(&away, &[]).expect_err("nothing to serve").to_string();
    assert!(error.contains("damaged") && !error.contains(&identity.user_data), "{error}");
}

#[privileged::test]
fn an_agent_with_another_directory_does_not_serve_the_snapshot_and_does_not_replace_it() {
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let records = removable(node.records.path());
    std::fs::create_dir(&records).expect("a directory");
    identity.write(&records, 1).expect("a record");
    let guest = node.boot(&identity);
    let agent = node.agent_for(&records);
    fetch_own(&guest).expect("an answer before the mistake");
    assert!(agent.stop().expect("stopped").success());
    let snapshot = node.records.path().join("state/records.snapshot");
    let good = std::fs::read(&snapshot).expect("the agent saved it at its end");

    let mistyped = node.records.path().join("elsewere");
    let error = node.try_agent(&mistyped, &[]).expect_err("nothing to serve").to_string();
    let own = format!("are of {} and are not served", records.display());
    assert!(error.contains(&own) && error.contains(&mistyped.display().to_string()), "{error}");
    assert_eq!(std::fs::read(&snapshot).expect("it is kept"), good);

    // With the mistake fixed, the guest is served although the directory is unavailable.
    std::fs::rename(&records, node.records.path().join("hidden")).expect("the directory is unavailable");
    let agent = node.agent_for(&records);
    fetch_own(&guest).expect("an answer from the snapshot");
    assert!(agent.eventually_logs("serving from the snapshot"), "{}", agent.log());
}
