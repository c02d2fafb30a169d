//! The agent is killed, crashes, is stopped: its ports stay closed, guests' other traffic goes on, and the next agent
//! answers what the last one could not.

use anyhow::{Context as _, Result, ensure};
use aya::maps::MapInfo;
use aya::programs::links::PinnedLink;
use aya::programs::{loaded_links, loaded_programs};
use std::collections::HashSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::agent::{self, Agent, Metrics, PortArgument};
use support::answers::{self, PATHS};
use support::bpffs::Bpffs;
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::{self, Host};
use support::privileged;
use support::record::Identity;
use support::tap::{Shape, Tap};
use support::tap_client::storm;
use tempfile::TempDir;

/// For one request.
const REQUEST: Duration = Duration::from_secs(5);
/// For what must come: generous, since it is waited out only in failure.
const PATIENCE: Duration = Duration::from_secs(20);
const PATH: &str = "/v1/user-data";

/// A node whose agents keep what they pin.
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

    fn agent(&self) -> Agent<'_> {
        self.agent_for(self.records.path())
    }

    /// An agent for records in that directory; state and sockets are the node's.
    fn agent_for(&self, records: &Path) -> Agent<'_> {
        let mut words = agent::arguments_with_pins(self.records.path(), &self.ports, &self.bpffs.pins());
        let given = words.iter().position(|word| word == "--records").expect("it is given");
        words[given + 1] = records.into();
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    fn release(&self, more: &[&str]) -> Output {
        let pins = self.bpffs.pins();
        self.release_of("--pins", &pins, more)
    }

    /// Releases the pins that an option names.
    fn release_of(&self, option: &str, path: &Path, more: &[&str]) -> Output {
        let mut command = Command::new(agent::binary().expect("the agent is built"));
        command.arg("release").arg(option).arg(path).args(more);
        self.host.ns().output(&mut command).expect("it runs")
    }
}

/// Another station on the bridge, which hears what is sent to all.
fn listener(host: &Host) -> Tap {
    let tap = Tap::create(host.ns(), "ear", Shape::default()).expect("a tap");
    host.ns().ip(&format!("link set ear master {} up", host::BRIDGE)).expect("on the bridge");
    tap
}

/// Frames with the metadata address in them that a tap has got.
fn overheard(tap: &Tap) -> usize {
    let mut buffer = [0; 2048];
    let mut heard = 0;
    while let Some(len) = tap.receive(0, &mut buffer).expect("the tap is there") {
        heard += usize::from(buffer[..len].windows(4).any(|octets| octets == METADATA.octets()));
    }
    heard
}

fn gets_its_own(guest: &Guest) -> Result<()> {
    guest.fetch_own(PATH, REQUEST).map(drop)
}

#[test]
fn nothing_for_the_metadata_address_leaves_a_tap_whose_agent_was_killed() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let server = node.host.server(7).expect("a server");
    let agent = node.agent();
    gets_its_own(&guest).expect("before");
    agent.kill().expect("killed");
    let ear = listener(&node.host);
    for (way, words) in
        [("over IPv4", "169.254.169.254/32 dev eth0"), ("by the gateway", "169.254.169.254/32 via 10.0.2.2")]
    {
        guest.ns().ip(&format!("route replace {words}")).expect("a route");
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("nobody answers");
        let _ = guest.ping(METADATA, 3);
        assert_eq!(overheard(&ear), 0, "{way}");
    }
    guest.echo(server.address(), 100_000).expect("other traffic goes on");
    assert_eq!(guest.ping(host::ADDRESS, 20).expect("ping"), 20);
    let agent = node.agent();
    eventually(PATIENCE, || gets_its_own(&guest)).unwrap_or_else(|e| panic!("{e:#}\n{}", agent.said()));
}

/// What an agent has counted once nothing moves any more: counters are read one after the other.
fn settled(agent: &Agent<'_>) -> Result<Metrics> {
    let mut last = agent.metrics()?;
    eventually(PATIENCE, || {
        let former = std::mem::replace(&mut last, agent.metrics()?);
        for verdict in ["steer_", "socket_"] {
            ensure!(last.frames(verdict)? == former.frames(verdict)?, "{verdict} still counts");
        }
        Ok(())
    })?;
    Ok(last)
}

#[test]
fn what_is_steered_to_an_agent_that_was_killed_ends_at_its_hub() {
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
        gets_its_own(&guest).expect("before");
        let before = settled(&agent).expect("metrics");
        agent.kill().expect("killed");
        let links = node.host.ns().ip("-o link").expect("the list of links");
        assert!(links.contains("imds-in"), "the veth outlives its agent, which makes this test: {links}");
        guest.fetch(PATH, Duration::from_secs(3)).expect_err("nobody answers");
        // What its TCP sends again while the next agent makes its hub anew would end at none.
        guest.ns().ip("link set eth0 down").expect("a silent guest");
        let agent = node.agent();
        let after = agent.metrics().expect("metrics");
        let more =
            |verdict| after.frames(verdict).expect("a count") - before.frames(verdict).expect("a count");
        // The last segment of the guest's first connection may have come to the agent while it lived.
        let (steered, ended, delivered) =
            (more("steer_"), more("socket_drop_absent"), more("socket_delivered"));
        assert!(
            ended > 0 && ended + delivered >= steered,
            "{steer}: {steered} steered, {ended} ended at the hub, {delivered} were delivered"
        );
    }
}

#[test]
fn a_request_that_was_on_its_way_is_answered_by_the_next_agent() {
    if !privileged::or_skip() {
        return;
    }
    // Two, so that a slot dealt out anew would be noticed: the first record to come is not the first that was.
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&identities);
    let [first, second] =
        identities.each_ref().map(|identity| Guest::boot(&node.host, &Spec::of(identity)).expect("a guest"));
    let agent = node.agent();
    gets_its_own(&first).expect("before");
    gets_its_own(&second).expect("before");
    agent.kill().expect("killed");
    // The kernel answers the handshake all the same.
    let address = SocketAddr::from((METADATA, 80));
    let mut connection =
        second.ns().run_in(|| TcpStream::connect_timeout(&address, REQUEST)).expect("connected");
    write!(connection, "GET {PATH} HTTP/1.1\r\nHost: {METADATA}\r\nConnection: close\r\n\r\n").expect("sent");
    connection.set_read_timeout(Some(Duration::from_millis(300))).expect("a timeout");
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).expect_err("nobody answers yet");
    let agent = node.agent();
    connection.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let read = connection.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    read.unwrap_or_else(|error| panic!("{error} after {text:?}\n{}", agent.said()));
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body).expect("an answer");
    answers::check(&identities[1], PATH, 200, body.as_bytes()).expect("its own");
}

#[test]
fn a_guest_of_a_killed_agent_is_answered_before_its_port_is_attached_again() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0)];
    let node = Node::new(&identities);
    let guest = Guest::boot(&node.host, &Spec::of(&identities[0])).expect("a guest");
    node.agent().kill().expect("killed");
    // Its program stays on the device, held here, and the next agent finds no link under the link's name.
    let links = node.bpffs.port_links();
    let [link] = &links[..] else { panic!("one link: {links:?}") };
    let pin = node.bpffs.pins().join("v1/links").join(link);
    let _held = PinnedLink::from_pin(&pin).expect("a link");
    std::fs::remove_file(&pin).expect("removed");
    std::fs::create_dir(&pin).expect("a directory in its place");
    let agent = node.agent();
    eventually(PATIENCE, || gets_its_own(&guest)).expect("answered");
    let metrics = agent.metrics().expect("metrics");
    let attached = metrics.samples().iter().find(|sample| sample.name == "xdp_imds_ports");
    assert_eq!(attached.map(|sample| sample.value), Some(0.0), "the port could be attached after all");
    std::fs::remove_dir(&pin).expect("removed");
}

#[test]
fn a_port_whose_record_went_while_no_agent_ran_is_given_up() {
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
    .expect("its pin goes");
    gets_its_own(&guests[0]).expect("the other's stays");
}

#[test]
fn a_tap_that_went_while_no_agent_ran_leaves_no_pin() {
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
        ensure!(node.bpffs.port_links().len() == 1, "{:?}\n{}", node.bpffs.port_links(), agent.said());
        Ok(())
    })
    .expect("swept");
    gets_its_own(&stays).expect("the other");
    let comes = Guest::boot(&node.host, &Spec::of(&identities[1])).expect("a guest");
    eventually(PATIENCE, || gets_its_own(&comes)).expect("its successor");
}

/// What this node's agents have in the kernel: links, programs, maps.
fn objects(bpffs: &Bpffs) -> Result<[usize; 3]> {
    let pinned = std::fs::read_dir(bpffs.pins().join("v1/maps"))?;
    let pinned: HashSet<u32> =
        pinned.map(|map| Ok(MapInfo::from_pin(map?.path())?.id())).collect::<Result<_>>()?;
    let (mut programs, mut maps) = (HashSet::new(), HashSet::new());
    // Others' come and go meanwhile.
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
fn twenty_crashes_disturb_no_other_traffic_and_leave_nothing_more_behind() {
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
        // The kernel lets go of a dead process's programs a little later.
        let first = (|| {
            node.agent().kill()?;
            std::thread::sleep(Duration::from_secs(2));
            objects(&node.bpffs)
        })();
        let crash = |first: &[usize; 3]| {
            node.agent().kill()?;
            eventually(PATIENCE, || {
                let now = objects(&node.bpffs)?;
                ensure!(now == *first, "{now:?}, {first:?} after the first");
                Ok(())
            })
        };
        let counts = first.and_then(|first| (1..20).try_for_each(|_| crash(&first)).map(|()| first));
        over.store(true, Ordering::Relaxed);
        assert_eq!(pinging.join().expect("no panic"), 0, "pings lost");
        streaming.join().expect("no panic").expect("a stream that goes on");
        counts
    });
    let counts = counts.expect("the same after each of twenty crashes");
    eprintln!("links, programs and maps after a crash: {counts:?}");
    assert!(counts[0] >= 1, "{counts:?}");
    let _agent = node.agent();
    gets_its_own(&guest).expect("in the end");
}

#[test]
fn guests_that_boot_while_their_agent_is_killed_all_complete() {
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
            // As cloud-init does: what failed is asked for again, ten times.
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
        eprintln!("steered when killed: {before}, in the end: {after}");
        let all = u64::from(GUESTS) * 40;
        assert!(before < all && after >= all, "{before} frames steered before, {after} in the end");
        retries
    });
    eprintln!("retries: {retries:?}");
    assert!(retries.is_some(), "{} guests never completed", booting.len());
}

#[test]
fn release_frees_the_ports_of_an_agent_that_has_ended_and_not_of_one_that_runs() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    let said = |output: &Output| {
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
    };
    let nothing = node.release(&[]);
    assert!(nothing.status.success() && said(&nothing).contains("nothing is pinned"), "{}", said(&nothing));

    let agent = node.agent();
    let refused = node.release(&[]);
    assert!(!refused.status.success() && said(&refused).contains("--takeover"), "{}", said(&refused));
    gets_its_own(&guest).expect("still served");
    assert!(agent.stop().expect("stopped").success());

    let ear = listener(&node.host);
    guest.fetch(PATH, Duration::from_secs(1)).expect_err("nobody answers");
    assert_eq!(overheard(&ear), 0, "a clean stop leaves the port closed as well");
    let released = node.release(&[]);
    assert!(released.status.success() && said(&released).contains("took 1 program"), "{}", said(&released));
    eventually(PATIENCE, || {
        guest.fetch(PATH, Duration::from_secs(1)).expect_err("nobody answers");
        ensure!(overheard(&ear) > 0, "the port is still closed");
        Ok(())
    })
    .expect("open");
}

#[test]
fn release_finds_the_pins_by_run_directory_or_configuration() {
    if !privileged::or_skip() {
        return;
    }
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

#[test]
fn an_agent_without_a_bpffs_says_what_to_do() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new(&[]);
    let elsewhere = tempfile::tempdir().expect("a directory");
    let words = agent::arguments_with_pins(node.records.path(), &[], &elsewhere.path().join("pins"));
    let binary = agent::binary().expect("the agent is built");
    let error = Agent::start_binary(&binary, node.host.ns(), words).expect_err("a refusal").to_string();
    assert!(error.contains("mount -t bpf bpf /sys/fs/bpf") && error.contains("--no-pins"), "{error}");
}

/// Moves the records away, as a mount that is missing does.
fn move_away(records: &Path) -> std::path::PathBuf {
    records.join("elsewhere")
}

#[test]
fn records_are_served_from_the_snapshot_while_their_directory_is_away() {
    if !privileged::or_skip() {
        return;
    }
    let identities = [Identity::of(0), Identity::of(1)];
    let node = Node::new(&[]);
    let records = move_away(node.records.path());
    std::fs::create_dir(&records).expect("a directory");
    let ports: Vec<_> =
        identities.iter().map(|one| PortArgument::new(Host::tap_name(one), one.mac)).collect();
    let node = Node { ports, ..node };
    for identity in &identities {
        identity.write(&records, 1).expect("a record");
    }
    let [stays, goes] =
        identities.each_ref().map(|identity| Guest::boot(&node.host, &Spec::of(identity)).expect("a guest"));
    let agent = node.agent_for(&records);
    gets_its_own(&stays).expect("before");
    assert!(agent.stop().expect("stopped").success());

    let hidden = node.records.path().join("hidden");
    std::fs::rename(&records, &hidden).expect("the directory is away");
    let agent = node.agent_for(&records);
    gets_its_own(&stays).expect("from the snapshot");
    gets_its_own(&goes).expect("from the snapshot");
    let source = |agent: &Agent<'_>, name: &str| -> Result<f64> {
        let metrics = agent.metrics()?;
        let mut samples = metrics.samples().iter();
        let found = samples
            .find(|one| one.name == "xdp_imds_records_source" && one.label("source") == Some(name))
            .context("no such metric")?;
        Ok(found.value)
    };
    assert_eq!(source(&agent, "snapshot").expect("a metric"), 1.0);
    assert!(agent.comes_to_say("serving from the snapshot"), "{}", agent.said());
    assert!(!agent.said().contains(&identities[0].user_data), "no record is in the log");

    // It comes back without one of them, and with news of the other.
    std::fs::remove_file(identities[1].path(&hidden)).expect("removed");
    let renewed = Identity::of(0).with_user_data_of(3_000);
    renewed.write(&hidden, 2).expect("a record");
    std::fs::rename(&hidden, &records).expect("the directory is back");
    eventually(PATIENCE, || {
        let fetched = stays.fetch(PATH, REQUEST)?;
        answers::check(&renewed, PATH, fetched.status, &fetched.body)
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", agent.said()));
    assert_eq!(source(&agent, "source").expect("a metric"), 1.0);
    eventually(PATIENCE, || {
        let fetched = goes.fetch(PATH, REQUEST)?;
        ensure!(fetched.status == 404, "still answered with {}", fetched.status);
        Ok(())
    })
    .expect("the record that did not come back is gone");
}

#[test]
fn a_damaged_snapshot_is_a_warning() {
    if !privileged::or_skip() {
        return;
    }
    let identity = Identity::of(0);
    let node = Node::new(std::slice::from_ref(&identity));
    let guest = Guest::boot(&node.host, &Spec::of(&identity)).expect("a guest");
    assert!(node.agent().stop().expect("stopped").success());
    let snapshot = node.records.path().join("state/records.snapshot");
    let good = std::fs::read(&snapshot).expect("kept at the end");
    std::fs::write(&snapshot, &good[..good.len() / 2]).expect("damaged");
    // With its source there it is not even looked at.
    let agent = node.agent();
    gets_its_own(&guest).expect("from the source");
    assert!(agent.stop().expect("stopped").success());
    assert_eq!(std::fs::read(&snapshot).expect("kept anew"), good);
    // Without, the agent says so and ends as it does without a snapshot.
    std::fs::write(&snapshot, &good[..good.len() / 2]).expect("damaged");
    let mut words = agent::arguments_with_pins(node.records.path(), &node.ports, &node.bpffs.pins());
    let given = words.iter().position(|word| word == "--records").expect("it is given");
    words[given + 1] = node.records.path().join("away").into();
    let binary = agent::binary().expect("the agent is built");
    let error =
        Agent::start_binary(&binary, node.host.ns(), words).expect_err("nothing to serve").to_string();
    assert!(error.contains("damaged") && !error.contains(&identity.user_data), "{error}");
}
