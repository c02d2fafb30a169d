//! Scripted conversations for each TCP state.
//!
//! Each script starts after the handshake. Sequence numbers are relative to the initial ones, so that the first
//! byte of either side is 1.
//!
//! | line | meaning |
//! |---|---|
//! | `> FLAGS seq ack "orders"` | the guest sends orders to the [toy service](support::toy), one per line |
//! | `> FLAGS seq ack (n)` | the guest sends n bytes without a line end, so the service does nothing |
//! | `win n` at the end of a `>` line | sets the guest's window for this and later segments |
//! | `< FLAGS seq ack n` | the service must have sent this segment, with n bytes |
//! | `+ ms` | time passes |
//! | `= n` | the stack must hold n connections |
//!
//! FLAGS are S, F, R, P and `.` for ACK. The script must list every segment of the service in order.

use std::collections::VecDeque;
use std::time::Duration;

use metadata_datapath::stack::StackConfig;
use smoltcp::wire::TcpControl;
use support::raw::{Raw, Reply, Segment};
use support::toy::{self, Toy};

const PORT: u16 = 40_000;

struct Player {
    name: &'static str,
    raw: Raw<Toy>,
    /// The initial sequence numbers of the guest and the service.
    initial: (u32, u32),
    window: u16,
    received: VecDeque<String>,
}

impl Player {
    fn new(name: &'static str, initial: u32) -> Self {
        let mut raw = Raw::new(toy::stack(StackConfig::default()).0);
        let opened = raw.send(&Segment::syn(PORT, initial));
        let initial = (initial, opened[0].seq);
        Self { name, raw, initial, window: 65_535, received: VecDeque::new() }
    }

    fn receive(&mut self, replies: &[Reply]) {
        for reply in replies {
            let (syn, ack, fin, rst) = reply.flags;
            let flags: String = [(syn, 'S'), (fin, 'F'), (rst, 'R'), (ack, '.')]
                .into_iter()
                .filter_map(|(set, flag)| set.then_some(flag))
                .collect();
            let (ours, theirs) = self.initial;
            // Relative numbers start at each SYN-ACK.
            let seq = reply.seq.wrapping_sub(theirs);
            let ack = if ack { reply.ack.wrapping_sub(ours) } else { 0 };
            self.received.push_back(format!("< {flags} {seq} {ack} {}", reply.payload.len()));
        }
    }

    fn silence(&self, line: &str) {
        assert!(self.received.is_empty(), "{}: unexpected before {line:?}: {:?}", self.name, self.received);
    }

    fn send(&mut self, line: &str) {
        let mut words = line.split(' ').skip(1);
        let flags = words.next().expect("flags");
        let mut number = || words.next().and_then(|word| word.parse::<u32>().ok()).expect("a number");
        let (seq, ack) = (number(), number());
        if let Some((_, window)) = line.split_once(" win ") {
            self.window = window.parse().expect("a window");
        }
        let payload = match (line.split('"').nth(1), line.split(['(', ')']).nth(1)) {
            (Some(orders), _) => orders.split(';').map(|order| format!("{order}\n")).collect(),
            (None, Some(bytes)) => "?".repeat(bytes.parse().expect("a number")),
            _ => String::new(),
        };
        let control = match flags.trim_end_matches('.') {
            "S" => TcpControl::Syn,
            "F" => TcpControl::Fin,
            "R" => TcpControl::Rst,
            "P" => TcpControl::Psh,
            _ => TcpControl::None,
        };
        let (ours, theirs) = self.initial;
        let segment = Segment {
            ack: flags.ends_with('.').then(|| theirs.wrapping_add(ack)),
            window: self.window,
            ..Segment::ack(PORT, ours.wrapping_add(seq), 0)
        };
        let replies = self.raw.send(&segment.control(control).with(payload.as_bytes()));
        self.receive(&replies);
    }

    fn play(&mut self, script: &str) {
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            match line.split_at(2) {
                ("> ", _) => {
                    self.silence(line);
                    self.send(line);
                }
                ("+ ", ms) => {
                    self.silence(line);
                    let time = Duration::from_millis(ms.parse().expect("milliseconds"));
                    let replies = self.raw.wait(time);
                    self.receive(&replies);
                }
                ("= ", count) => {
                    let held = self.raw.stack.stats().connections;
                    assert_eq!(held.to_string(), count, "{}: connections held", self.name);
                }
                _ => {
                    let received = self.received.pop_front();
                    assert_eq!(received.as_deref(), Some(line), "{}, then {:?}", self.name, self.received);
                }
            }
        }
        self.silence("the end");
    }
}

/// Plays scripts, also with sequence numbers that wrap around.
fn play(scripts: &[(&'static str, &str)]) {
    for (name, script) in scripts {
        for initial in [1000, u32::MAX - 5] {
            Player::new(name, initial).play(script);
        }
    }
}

#[test]
fn established_accepts_the_next_bytes_and_acknowledges_up_to_a_gap() {
    play(&[
        ("the end of the handshake", "> . 1 1\n = 0"),
        ("a request", "> P. 1 1 \"far 300\"\n < . 1 9 300\n > . 9 301\n = 1\n + 5000"),
        ("an order in two segments", "> P. 1 1 (3)\n < . 1 4 0\n > . 4 1\n = 1"),
        (
            "a gap is not kept",
            "> P. 1 1 \"far 1\"\n < . 1 7 1\n > P. 13 2 \"far 9\"\n < . 2 7 0
             > P. 7 2 \"far 5\"\n < . 2 13 5\n > P. 13 7 \"far 9\"\n < . 7 19 9",
        ),
        ("known bytes are cut off", "> P. 1 1 (3)\n < . 1 4 0\n > P. 1 1 (5)\n < . 1 6 0"),
        ("old bytes", "> P. 1 1 (5)\n < . 1 6 0\n > P. 1 1 (5)\n < . 1 6 0\n = 1"),
        ("a keep-alive probe", "> P. 1 1 (5)\n < . 1 6 0\n > . 5 1\n < . 1 6 0"),
        ("no ACK bit", "> P. 1 1 (5)\n < . 1 6 0\n > P 6 0 (5)\n = 1"),
        ("more than the window", "> P. 1 1 (3500)\n < . 1 3073 0"),
        ("an acknowledgement of what was never sent", "> P. 1 1 (5)\n < . 1 6 0\n > P. 6 99 (5)\n < . 1 6 0"),
        (
            "two ends that disagree stop acknowledging each other",
            "> P. 1 1 (5)\n < . 1 6 0\n > . 6 99\n < . 1 6 0\n > . 6 99\n > . 6 99\n + 500
             > . 6 99\n < . 1 6 0",
        ),
        ("a service that aborts", "> P. 1 1 \"abort\"\n < R. 1 7 0\n = 0"),
    ]);
}

#[test]
fn resets_and_syns_are_accepted_only_with_matching_numbers() {
    play(&[
        ("a reset with the next number", "> P. 1 1 (5)\n < . 1 6 0\n > R 6 0\n = 0"),
        ("a reset in the window", "> P. 1 1 (5)\n < . 1 6 0\n > R 7 0\n < . 1 6 0\n = 1"),
        ("a reset outside", "> P. 1 1 (5)\n < . 1 6 0\n > R 9000 0\n > R 5 0\n = 1"),
        ("a SYN of this connection", "> P. 1 1 (5)\n < . 1 6 0\n > P. 6 1 (5)\n < . 1 11 0\n = 1"),
        ("a SYN-ACK", "> P. 1 1 (5)\n < . 1 6 0\n > S. 6 1\n < . 1 6 0\n = 1"),
    ]);
}

#[test]
fn a_guest_that_closes_first_goes_through_close_wait_and_last_ack() {
    play(&[
        ("without a request", "> F. 1 1\n < F. 1 2 0\n = 1\n > . 2 2\n = 0"),
        ("its FIN is repeated", "> F. 1 1\n < F. 1 2 0\n > F. 1 1\n < . 2 2 0\n > . 2 2\n = 0"),
        (
            "the service's FIN is lost",
            "> F. 1 1\n < F. 1 2 0\n + 250\n < F. 1 2 0\n + 400\n < F. 1 2 0\n > . 2 2\n = 0",
        ),
        (
            "its request is parked",
            "> P. 1 1 \"park 600\"\n < . 1 10 0\n > F. 10 1\n < F. 1 11 0\n > . 11 2\n = 0",
        ),
        (
            "its FIN arrives after a gap",
            "> P. 1 1 (5)\n < . 1 6 0\n > F. 9 1\n < . 1 6 0\n > F. 6 1 (3)\n < F. 1 10 0",
        ),
    ]);
}

#[test]
fn a_service_that_closes_first_goes_through_fin_wait_and_time_wait() {
    play(&[
        (
            "the guest acknowledges the FIN, then sends its own",
            "> P. 1 1 \"far 300;close\"\n < F. 1 15 300\n > . 15 302\n = 1\n > F. 15 302\n < . 302 16 0\n = 0
             > F. 15 302\n < . 302 16 0\n > . 16 302\n > R 16 0\n > F. 15 302\n < . 302 16 0",
        ),
        (
            "the guest's FIN acknowledges the service's",
            "> P. 1 1 \"close\"\n < F. 1 7 0\n > F. 7 2\n < . 2 8 0\n = 0",
        ),
        ("the FINs cross", "> P. 1 1 \"close\"\n < F. 1 7 0\n > F. 7 1\n < . 2 8 0\n = 1\n > . 8 2\n = 0"),
        (
            "the guest sends more after the service's FIN",
            "> P. 1 1 \"close\"\n < F. 1 7 0\n > P. 7 2 (1000)\n < . 2 1007 0\n > P. 1007 2 (3000)
             < . 2 4007 0\n > F. 4007 2\n < . 2 4008 0\n = 0",
        ),
        (
            "a repeated first segment opens no connection",
            "> P. 1 1 \"close\"\n < F. 1 7 0\n > F. 7 2\n < . 2 8 0\n > P. 1 1 \"close\"\n = 0",
        ),
        (
            "the guest closed first and repeats a FIN that it sent before the service's arrived",
            "> F. 1 1\n < F. 1 2 0\n > . 2 2\n = 0\n > F. 1 1\n < F. 1 2 0\n = 0",
        ),
    ]);
}

#[test]
fn unacknowledged_segments_are_retransmitted_with_backoff() {
    play(&[
        (
            "one segment",
            "> P. 1 1 \"far 300\"\n < . 1 9 300\n + 199\n + 1\n < . 1 9 300\n + 399\n + 1\n < . 1 9 300
             + 800\n < . 1 9 300\n > . 9 301\n + 5000",
        ),
        (
            "several segments: the first, and the rest after its acknowledgement",
            "> P. 1 1 \"far 4000\"\n < . 1 10 1460\n < . 1461 10 1460\n < . 2921 10 1080\n + 200
             < . 1 10 1460\n > . 10 1461\n < . 1461 10 1460\n < . 2921 10 1080\n > . 10 4001\n + 5000",
        ),
        ("the FIN is repeated with its data", "> P. 1 1 \"far 5;close\"\n < F. 1 13 5\n + 200\n < F. 1 13 5"),
        (
            "FIN alone after its data was acknowledged",
            "> P. 1 1 \"far 5;close\"\n < F. 1 13 5\n > . 13 6\n + 250\n < F. 6 13 0",
        ),
    ]);
}

#[test]
fn three_duplicate_acknowledgements_retransmit_a_segment_at_once() {
    let lost = "> P. 1 1 \"far 7300\"\n < . 1 10 1460\n < . 1461 10 1460\n < . 2921 10 1460
        < . 4381 10 1460\n < . 5841 10 1460\n > . 10 1461\n > . 10 1461\n > . 10 1461\n > . 10 1461
        < . 1461 10 1460\n";
    play(&[
        ("one loss", &format!("{lost} > . 10 7301\n + 5000\n = 1")),
        ("two losses", &format!("{lost} > . 10 4381\n < . 4381 10 1460\n > . 10 7301\n + 5000")),
        ("further duplicates repeat nothing", &format!("{lost} > . 10 1461\n > . 10 1461\n > . 10 7301")),
        (
            "a changed window is no duplicate",
            "> P. 1 1 \"far 9\"\n < . 1 7 9\n > . 7 1 win 9000\n > . 7 1 win 8000
             > . 7 1 win 7000\n > . 7 1 win 6000",
        ),
    ]);
}

#[test]
fn slow_start_sends_ten_segments_and_two_for_each_acknowledged() {
    let ten: String = (0..10).map(|n| format!("< . {} 11 1460\n", 1 + n * 1460)).collect();
    play(&[(
        "slow start",
        &format!(
            "> P. 1 1 \"far 50000\"\n {ten} > . 11 1461\n < . 14601 11 1460\n < . 16061 11 1460
             > . 11 4381\n < . 17521 11 1460\n < . 18981 11 1460\n < . 20441 11 1460\n < . 21901 11 1460\n > R 11 0"
        ),
    )]);
}

#[test]
fn small_windows_are_respected_and_closed_ones_probed() {
    play(&[
        (
            "a closed window",
            "> P. 1 1 \"far 300\" win 0\n < . 1 9 0\n + 200\n < . 1 9 1\n > . 9 1\n + 400\n < . 1 9 1
             > . 9 1 win 1000\n < . 1 9 300\n > . 9 301\n = 1\n + 5000",
        ),
        (
            "the guest accepts the byte of the probe",
            "> P. 1 1 \"far 300\" win 0\n < . 1 9 0\n + 200\n < . 1 9 1\n > . 9 2 win 1000\n < . 2 9 299",
        ),
        (
            "a window smaller than a segment is used only after a delay",
            "> P. 1 1 \"far 3000\" win 1000\n < . 1 10 1000\n > . 10 1001 win 100
             + 250\n < . 1001 10 100\n > . 10 1101 win 2000\n < . 1101 10 1460\n < . 2561 10 440",
        ),
        ("a FIN needs no window", "> P. 1 1 \"close\" win 0\n < F. 1 7 0"),
        (
            "a window that shrinks",
            "> P. 1 1 \"far 2920\"\n < . 1 10 1460\n < . 1461 10 1460\n > . 10 1461 win 0\n + 200
             < . 1461 10 1\n > . 10 1461 win 4000\n < . 1461 10 1460\n > . 10 2921",
        ),
    ]);
}
