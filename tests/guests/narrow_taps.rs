//! On a tap with a small MTU, a guest that does not know the MTU gets only segments that fit.

use anyhow::{Result, bail};
use std::net::IpAddr;
use std::time::Duration;

use support::agent::{self, Agent, PortArgument};
use support::eventually::eventually;
use support::host::Host;
use support::privileged;
use support::record::Identity;
use support::station::Station;
use support::tap::Shape;

const USER_DATA: usize = 16 * 1024;
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a frame's headers over IPv4 and over IPv6, without options.
const HEADERS: [usize; 2] = [14 + 20 + 20, 14 + 40 + 20];
/// MTUs, each with the segment sizes announced and used, over IPv4 and over IPv6.
const SIZES: [(u16, [(u16, usize); 2]); 4] = [
    (1_400, [(1_360, 1_360), (1_340, 1_340)]),
    (1_280, [(1_240, 1_220), (1_220, 1_220)]),
    (1_450, [(1_410, 1_400), (1_390, 1_380)]),
    (1_500, [(1_460, 1_460), (1_440, 1_440)]),
];

/// The MSS that the answer to a SYN announces.
fn announced(station: &mut Station, to: (IpAddr, u16)) -> Result<Option<u16>> {
    let talk = station.talk(to);
    station.receive()?;
    station.transmit(&talk.syn())?;
    station.wait(Duration::from_secs(1));
    let replies = station.segments()?;
    Ok(replies.iter().find(|reply| talk.is_theirs(reply) && reply.flags.0).and_then(|reply| reply.mss))
}

#[test]
fn all_segments_fit_the_mtu_of_a_tap_even_after_it_changes() {
    if !privileged::or_skip() {
        return;
    }
    let binary = agent::binary().expect("the agent is built");
    let services = ["169.254.169.254", "fd00:ec2::254"].map(|text| (text.parse().expect("an address"), 80));
    for config in ["", "answer_in_kernel: false\n", "steer: tcx\n"] {
        let host = Host::new().expect("a node");
        let records = tempfile::tempdir().expect("a directory");
        let identity = Identity::of(0).with_user_data_of(USER_DATA);
        identity.write(records.path(), 1).expect("a record");
        let tap = host.tap(&identity, Shape::default()).expect("a tap");
        let set = |mtu| host.ns().ip(&format!("link set {} mtu {mtu}", tap.name())).expect("an MTU");
        // The first MTU is set before the agent attaches.
        set(SIZES[0].0);
        let file = records.path().join("agent.conf");
        std::fs::write(&file, config).expect("a configuration");
        let mut words = agent::arguments(records.path(), &[PortArgument::new(tap.name(), identity.mac)]);
        words.extend(["--config".into(), file.into()]);
        let _agent = Agent::start_binary(&binary, host.ns(), words).expect("an agent");
        let mut station = Station::new(std::sync::Arc::clone(&tap), identity.mac, identity.address);
        station.remembers = true;
        for (mtu, sizes) in SIZES {
            set(mtu);
            for ((to, (size, used)), headers) in services.into_iter().zip(sizes).zip(HEADERS) {
                let name = format!("{config:?}, an MTU of {mtu}, {}", to.0);
                // The agent notices a change with some delay.
                eventually(PATIENCE, || match announced(&mut station, to)? {
                    Some(found) if found == size => Ok(()),
                    found => bail!("the announced size is {found:?}, not {size}"),
                })
                .unwrap_or_else(|error| panic!("{name}: {error:#}"));
                station.drain().expect("the station is silent");
                station.transcript();
                let request = b"GET /v1/user-data HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
                let answer = station.ask(to, request).unwrap_or_else(|error| panic!("{name}: {error:#}"));
                assert!(answer.len() > USER_DATA, "{name}: {} bytes", answer.len());
                let longest = station.transcript().iter().map(Vec::len).max();
                assert_eq!(longest, Some(headers + used), "{name}");
            }
        }
    }
}
