//! What a received frame costs in the stack alone: `cargo bench -p xdp-imds-tests --bench tcp_cost`.
//!
//! All guests do the same thing at the same time, so that each finds its connection out of the cache, as
//! in a boot storm: SYN, ACK, GET answered with 300 octets, FIN, ACK. Nothing is sent anywhere.

use std::sync::Arc;
use std::time::Duration;

use metadata_user::http::{Response, Status};
use metadata_user::serve::{Serve, ServeConfig};
use metadata_user::stack::{Stack, StackConfig, Transmit};
use metadata_user::store::{Endpoint, Host, Responses, Route, Store, Vm};
use smoltcp::wire::TcpControl;
use support::raw::Segment;
use support::wire::at;

const ROUNDS: u32 = 200;
const GET: &[u8] =
    b"GET /latest/meta-data HTTP/1.1\r\nHost: 169.254.169.254\r\nUser-Agent: Cloud-Init/25.1\r\n\
    Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n\r\n";
/// Where a frame's TCP header starts: behind 14 octets of Ethernet and 20 of IPv4.
const TCP: usize = 34;

/// Keeps where the service stands: the number after its last segment.
#[derive(Default)]
struct Tally {
    frames: u64,
    next: u32,
}

impl Transmit for Tally {
    fn send(&mut self, frame: &[u8]) {
        self.frames += 1;
        let seq = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]);
        let payload = frame.len() - TCP - usize::from(frame[46] >> 4) * 4;
        let flags = u32::from(frame[47] & 1) + u32::from(frame[47] >> 1 & 1);
        self.next = seq.wrapping_add(payload as u32).wrapping_add(flags);
    }
}

/// Time this thread has spent on a CPU: what else the machine does counts only by its use of the caches.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("schedstat of the kernel");
    let first = stat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(first.expect("nanoseconds on the CPU"))
}

fn main() {
    for guests in [100_u32, 1000, 4000] {
        measure(guests);
    }
}

fn measure(guests: u32) {
    let store = Arc::new(Store::new(guests));
    for slot in 0..guests {
        let mut responses = Responses::builder(Vm::alone("7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d"));
        let answer = Response::new(Status(200), Some("text/plain"), &[], vec![b'x'; 300]);
        responses.add(Host::Metadata, "/latest/meta-data", Route::new("test", Endpoint::Fixed(answer)));
        store.publish(slot, Arc::new(responses.build())).expect("a slot of the table");
    }
    let mut stack = Stack::new(StackConfig::default(), Serve::new(store, ServeConfig::default()));
    let get_end = 1001 + GET.len() as u32;
    let mut steps = [
        Segment::syn(0, 1000),
        Segment::ack(0, 1001, 0),
        Segment::ack(0, 1001, 0).with(GET),
        Segment::ack(0, get_end, 0).control(TcpControl::Fin),
        Segment::ack(0, get_end + 1, 0),
    ]
    .map(|segment| segment.frame(0));
    let mut stands = vec![0_u32; guests as usize];
    let mut tally = Tally::default();
    let rounds = (ROUNDS * 1000 / guests).min(50_000);
    let (mut spent, mut stepping) = ([Duration::ZERO; 5], Duration::ZERO);
    for round in 0..rounds {
        let now = at(Duration::from_millis(u64::from(round)));
        for (step, frame) in steps.iter_mut().enumerate() {
            frame[TCP..TCP + 2].copy_from_slice(&(1 + (round % 60_000) as u16).to_be_bytes());
            let start = on_cpu();
            for guest in 0..guests {
                frame[TCP + 8..TCP + 12].copy_from_slice(&stands[guest as usize].to_be_bytes());
                tally.next = stands[guest as usize];
                stack.receive(now, guest, frame, &mut tally);
                stands[guest as usize] = tally.next;
            }
            spent[step] += on_cpu().saturating_sub(start);
        }
        let start = on_cpu();
        stack.step(now, &mut tally);
        stepping += on_cpu().saturating_sub(start);
    }
    let requests = f64::from(rounds) * f64::from(guests);
    let ns = spent.map(|spent| spent.as_nanos() as f64 / requests);
    let stats = stack.stats();
    assert_eq!((stats.accepted as f64, stats.connections), (requests, 0), "every connection served and over");
    println!(
        "{guests:5} guests: SYN {:.0}, ACK {:.0}, GET {:.0}, FIN {:.0}, ACK {:.0} ns; {:.0} ns a frame, \
         {:.0} ns a request, {:.2} frames sent a request, step {:.0} ns",
        ns[0],
        ns[1],
        ns[2],
        ns[3],
        ns[4],
        ns.iter().sum::<f64>() / 5.0,
        ns.iter().sum::<f64>(),
        tally.frames as f64 / requests,
        stepping.as_nanos() as f64 / f64::from(rounds),
    );
}
