//! CPU time per received frame in the stack alone: `cargo bench -p xdp-imds-tests --bench tcp_cost`.
//!
//! All guests perform each step at the same time: SYN, ACK, GET with an answer of 300 octets, FIN, ACK. As in a boot
//! storm, their connections are therefore not in the CPU caches. Replies are discarded. The output has median and
//! range, for guests that complete their checksums and for guests that leave them to the device.

use std::sync::Arc;
use std::time::Duration;

use metadata_content::http::{Response, Status};
use metadata_content::store::{Endpoint, Host, Responses, Route, Store, Vm};
use metadata_datapath::stack::{Stack, StackConfig, Transmit};
use metadata_serve::Serve;
use smoltcp::wire::TcpControl;
use support::checksum;
use support::raw::Segment;
use support::wire::at;

const ROUNDS: u32 = 40;
const GET: &[u8] =
    b"GET /latest/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\nUser-Agent: Cloud-Init/25.1\r\n\
    Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n";
/// Where a frame's TCP header starts: behind 14 octets of Ethernet and 20 of IPv4.
const TCP: usize = 34;

/// Discards frames, and records the service's next sequence number.
#[derive(Default)]
struct Tally {
    next: u32,
}

impl Transmit for Tally {
    fn send(&mut self, frame: &[u8]) {
        let seq = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]);
        let payload = frame.len() - TCP - usize::from(frame[46] >> 4) * 4;
        let flags = u32::from(frame[47] & 1) + u32::from(frame[47] >> 1 & 1);
        self.next = seq.wrapping_add(payload as u32).wrapping_add(flags);
    }
}

/// CPU time of this thread. Other work on the machine affects it only through the caches.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat of the kernel");
    let first = stat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(first.expect("nanoseconds on the CPU"))
}

/// Number of measurements of each kind; the result is their median.
const REPEATS: usize = 5;

/// How a guest fills the checksums of its segments.
#[derive(Clone, Copy, Debug)]
enum Sums {
    Complete,
    Partial,
}

/// A frame with variable port, acknowledgement number and checksum.
struct Frame {
    octets: Vec<u8>,
    /// The sum of the constant octets, and the value of a partial checksum.
    rest: u32,
    partial: [u8; 2],
}

impl Frame {
    fn of(segment: &Segment) -> Self {
        let mut octets = segment.frame(0);
        checksum::partial(&mut octets);
        let partial = [octets[TCP + 16], octets[TCP + 17]];
        octets[TCP..TCP + 2].fill(0);
        octets[TCP + 8..TCP + 12].fill(0);
        let words = octets[TCP..].chunks(2);
        let rest = words.map(|w| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0))).sum();
        Self { octets, rest, partial }
    }

    fn take_port(&mut self, port: u16) {
        self.octets[TCP..TCP + 2].copy_from_slice(&port.to_be_bytes());
    }

    fn acknowledges(&mut self, ack: u32, sums: Sums) {
        self.octets[TCP + 8..TCP + 12].copy_from_slice(&ack.to_be_bytes());
        let port = u32::from(self.octets[TCP]) << 8 | u32::from(self.octets[TCP + 1]);
        let sum = self.rest + port + (ack >> 16) + (ack & 0xffff);
        let sum = (sum & 0xffff) + (sum >> 16);
        let complete = !((sum & 0xffff) + (sum >> 16)) as u16;
        let field = match sums {
            Sums::Complete => complete.to_be_bytes(),
            Sums::Partial => self.partial,
        };
        self.octets[TCP + 16..TCP + 18].copy_from_slice(&field);
    }
}

fn main() {
    for guests in [100_u32, 1000, 4000] {
        for sums in [Sums::Complete, Sums::Partial] {
            let mut costs: Vec<[f64; 6]> = Vec::new();
            for _ in 0..REPEATS {
                costs.push(measure(guests, sums));
            }
            let column = |at: usize| {
                let mut column: Vec<f64> = costs.iter().map(|cost| cost[at]).collect();
                column.sort_by(f64::total_cmp);
                format!("{:.0} ({:.0}-{:.0})", column[REPEATS / 2], column[0], column[REPEATS - 1])
            };
            let [syn, ack, get, fin, last, request] = std::array::from_fn(column);
            println!(
                "{guests:5} guests, {sums:?} checksums: SYN {syn}, ACK {ack}, GET {get}, FIN {fin}, ACK {last}; \
                 {request} ns per request"
            );
        }
    }
}

/// Nanoseconds per segment of each kind, and per request.
fn measure(guests: u32, sums: Sums) -> [f64; 6] {
    let store = Arc::new(Store::new(guests));
    for slot in 0..guests {
        let mut responses = Responses::builder(Vm::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
        let answer = Response::new(Status(200), Some("text/plain"), &[], vec![b'x'; 300]);
        responses.add(Host::Metadata, "/latest/meta-data", Route::new("test", Endpoint::Fixed(answer)));
        store.publish(slot, Arc::new(responses.build())).expect("a slot of the table");
    }
    let mut stack = Stack::new(StackConfig::default(), Serve::new(store));
    let get_end = 1001 + GET.len() as u32;
    let mut steps = [
        Segment::syn(0, 1000),
        Segment::ack(0, 1001, 0),
        Segment::ack(0, 1001, 0).with(GET),
        Segment::ack(0, get_end, 0).control(TcpControl::Fin),
        Segment::ack(0, get_end + 1, 0),
    ]
    .map(|segment| Frame::of(&segment));
    let mut next_numbers = vec![0_u32; guests as usize];
    let mut tally = Tally::default();
    let rounds = (ROUNDS * 1000 / guests).min(50_000);
    let mut spent = [Duration::ZERO; 5];
    for round in 0..rounds {
        let now = at(Duration::from_millis(u64::from(round)));
        for (step, frame) in steps.iter_mut().enumerate() {
            frame.take_port(1 + (round % 60_000) as u16);
            let start = on_cpu();
            for guest in 0..guests {
                frame.acknowledges(next_numbers[guest as usize], sums);
                tally.next = next_numbers[guest as usize];
                stack.receive(now, guest, &frame.octets, &mut tally);
                next_numbers[guest as usize] = tally.next;
            }
            spent[step] += on_cpu().saturating_sub(start);
        }
        stack.step(now, &mut tally);
    }
    let requests = f64::from(rounds) * f64::from(guests);
    let [syn, ack, get, fin, last] = spent.map(|spent| spent.as_nanos() as f64 / requests);
    let stats = stack.stats();
    assert_eq!(
        (stats.accepted as f64, stats.connections),
        (requests, 0),
        "every connection is served and closed"
    );
    assert_eq!(stats.dropped_checksum, 0, "every checksum is correct");
    [syn, ack, get, fin, last, syn + ack + get + fin + last]
}
