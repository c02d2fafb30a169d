//! The kernel's run statistics show that answering a frame costs little more than steering it.

use metadata_common::cookie::Flow;
use metadata_common::maps::{ANSWER_LINK, ANSWER_TCP, AllSent, FIN_ENDS, Identity, Port, PortKey, program};
use metadata_common::verdict::Fate;
use metadata_common::wire::{ethernet, ipv6, tcp};
use support::frames::{self, GUEST, SERVED_V4, SERVED_V6, SOLICITED};
use support::privileged;
use support::prog_test::{KEY, LOOPBACK, Programs, in_empty_namespace};

const PORT: PortKey = PortKey { netns: 3, ifindex: LOOPBACK };
const IDENTITY: Identity = Identity { slot: 7, hub: 1, drain: 0, reserved: 0 };
/// Runs per measurement; the median of `ROUNDS` measurements counts.
const RUNS: u64 = 2_000;
const ROUNDS: usize = 5;

/// A node with one guest and two posted connections, whose sequence numbers match the test frames.
fn node(answers: u64) -> Programs {
    let mut programs = Programs::load(PORT.netns).expect("the object loads");
    programs.serve(SERVED_V4.into()).expect("an IPv4 address is served");
    programs.serve(SERVED_V6.into()).expect("an IPv6 address is served");
    programs.place_hub(IDENTITY.hub).expect("the hub has a device");
    let port = Port { answers, ..Port::with_limit(1_000_000_000, 1_000_000) };
    programs.own(PORT, port).expect("the port is registered");
    programs.register(PORT, GUEST, IDENTITY).expect("the guest is registered");
    let packet = frames::tcp6(SERVED_V6, tcp::ACK);
    let guest = packet[ipv6::SOURCE..ipv6::DESTINATION].try_into().expect("an address");
    let ports = packet[ipv6::HEADER..ipv6::HEADER + 4].try_into().expect("two ports");
    let v4 = Flow::v4(&KEY, IDENTITY.slot, [10, 0, 2, 15], SERVED_V4.octets(), ports);
    let v6 = Flow::v6(&KEY, IDENTITY.slot, guest, SERVED_V6.octets(), ports);
    for flow in [v4, v6] {
        let entry = AllSent { sent: 5_000, received: 1_000, finished: FIN_ENDS, ..AllSent::default() };
        programs.post(flow, AllSent { flow: flow.number(), ..entry }).expect("an entry");
    }
    programs
}

/// Nanoseconds per run, including the kernel's clock reads.
fn measure(programs: &mut Programs, frame: &[u8]) -> f64 {
    let (before, runs) = programs.stats(program::PORT).expect("statistics");
    for _ in 0..RUNS {
        programs.run_uncounted(program::PORT, frame).expect("a run");
    }
    let (after, all) = programs.stats(program::PORT).expect("statistics");
    (after - before).as_nanos() as f64 / (all - runs) as f64
}

#[privileged::test]
fn an_answer_costs_little_more_than_steering() {
    let v4 = |flags| frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, flags));
    let v6 = |flags| frames::frame(&[], ethernet::IPV6, &frames::tcp6(SERVED_V6, flags));
    let cases = [
        ("arp", frames::frame(&[], ethernet::ARP, &frames::arp_request(SERVED_V4))),
        ("solicitation", frames::frame(&[], ethernet::IPV6, &frames::introduced(SOLICITED, SERVED_V6))),
        ("syn", v4(tcp::SYN)),
        ("ack", v4(tcp::ACK)),
        ("fin", v4(tcp::FIN | tcp::ACK)),
        ("syn over ipv6", v6(tcp::SYN)),
        ("fin over ipv6", v6(tcp::FIN | tcp::ACK)),
    ];
    in_empty_namespace(|| {
        let _statistics = aya::sys::enable_stats(aya::sys::Stats::RunTime).expect("run statistics");
        let mut nodes = [0, ANSWER_LINK | ANSWER_TCP].map(node);
        for (name, frame) in cases {
            let counted = nodes[1].run(program::PORT, &frame).expect("a run").counted;
            assert!(matches!(counted[0].0.fate(), Fate::Answer | Fate::Absorb), "{name}: {counted:?}");
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                for (node, times) in nodes.iter_mut().zip(&mut times) {
                    times.push(measure(node, &frame));
                }
            }
            let [steered, answered] = times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[ROUNDS / 2]
            });
            println!("{name:14} steered {steered:4.0} ns, answered {answered:4.0} ns");
            assert!(answered < 3.0 * steered, "{name}: {answered} ns against {steered} ns to steer it");
        }
    });
}
