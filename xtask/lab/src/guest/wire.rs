//! Reads the traffic on the guest's NIC from QEMU's packet dump (libpcap file format 2.4).
//!
//! QEMU sees frames before XDP drops or redirects them, and frames that XDP sends. The dump therefore has each exchange
//! as guest and server saw it, whichever server answered.

use anyhow::{Context as _, Result, ensure};
use metadata_common::mac::Mac;
use smoltcp::wire::{
    EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, Ipv6Packet, TcpPacket, UdpPacket,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use super::{BootOutcome, BootSubject};

const FILE_HEADER: usize = 24;
const RECORD_HEADER: usize = 16;
/// The mark of a little-endian file with times in microseconds.
const MAGIC: u32 = 0xa1b2_c3d4;
/// Lengths of the virtio header that some versions of QEMU leave in front of a dumped frame.
const PREFIXES: [usize; 3] = [0, 10, 12];
/// The port of every dialect. A booting guest uses it for nothing else.
const HTTP: u16 = 80;
const DHCP_SERVER: u16 = 67;
/// The path of events. Every dialect has it.
const EVENTS: &str = "/v1/events";

/// A request and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// Method and target.
    pub(super) request: String,
    /// The address that the request was sent to.
    pub(super) server: IpAddr,
    /// The status line of the answer; `None` without an answer.
    pub(super) answer: Option<String>,
    /// Time since the first request.
    pub(super) at: Duration,
    /// Time from the segment with the request to the first segment of the answer.
    pub(super) took: Duration,
    /// The hop limit (TTL) of that first segment; 0 without an answer.
    pub(super) hops: u8,
}

/// The traffic that the report shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    /// cloud-init's requests in their order.
    pub(super) exchanges: Vec<Exchange>,
    /// The requests about events, which cloud-init does not make.
    pub(super) events: Vec<Exchange>,
    /// Connections that the guest opened for them.
    pub(super) connections: usize,
    /// SYNs and requests that the guest sent again.
    pub(super) repeated: usize,
    /// DHCP messages in both directions.
    pub(super) dhcp: usize,
    /// DHCP messages before the first request.
    pub(super) dhcp_before: usize,
}

pub(super) fn read(dump: &[u8], nic: Mac) -> Result<Traffic> {
    let magic = word(dump, 0).context("the packet dump is empty")?;
    ensure!(magic == MAGIC, "the packet dump starts with {magic:#x}, not with {MAGIC:#x}");
    let mut reader = Reader { nic, ..Reader::default() };
    let mut at = FILE_HEADER;
    // QEMU may stop in the middle of the last record.
    while let (Some(seconds), Some(micros), Some(len)) =
        (word(dump, at), word(dump, at + 4), word(dump, at + 8))
    {
        let start = at + RECORD_HEADER;
        let Some(frame) = dump.get(start..start + len as usize) else { break };
        let time = Duration::from_secs(seconds.into()) + Duration::from_micros(micros.into());
        // Frames of other protocols are not counted.
        reader.frame(time, frame).unwrap_or_default();
        at = start + len as usize;
    }
    let mut traffic = reader.traffic;
    traffic.connections = reader.opened.len();
    (traffic.events, traffic.exchanges) = traffic.exchanges.into_iter().partition(Exchange::is_about_events);
    Ok(traffic)
}

fn word(dump: &[u8], at: usize) -> Option<u32> {
    let bytes = dump.get(at..at + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

/// The parts of a packet's IP header that are used here.
struct Path {
    from: IpAddr,
    to: IpAddr,
    hops: u8,
}

/// A connection: the server's address and the guest's port.
type Peer = (IpAddr, u16);

#[derive(Default)]
struct Reader {
    nic: Mac,
    traffic: Traffic,
    /// The time of the first request.
    first: Option<Duration>,
    /// Initial sequence numbers of connections.
    opened: HashSet<(Peer, i32)>,
    /// Sequence numbers of requests.
    requested: HashSet<(Peer, i32)>,
    /// The index of the exchange under way on each connection.
    asked: HashMap<Peer, usize>,
}

impl Reader {
    fn frame(&mut self, time: Duration, bytes: &[u8]) -> Option<()> {
        let bytes = self.without_prefix(bytes)?;
        let frame = EthernetFrame::new_checked(bytes).ok()?;
        match frame.ethertype() {
            EthernetProtocol::Ipv4 => {
                let packet = Ipv4Packet::new_checked(frame.payload()).ok()?;
                let path = Path {
                    from: packet.src_addr().into(),
                    to: packet.dst_addr().into(),
                    hops: packet.hop_limit(),
                };
                self.payload(time, &path, packet.next_header(), packet.payload())
            }
            EthernetProtocol::Ipv6 => {
                let packet = Ipv6Packet::new_checked(frame.payload()).ok()?;
                let path = Path {
                    from: packet.src_addr().into(),
                    to: packet.dst_addr().into(),
                    hops: packet.hop_limit(),
                };
                self.payload(time, &path, packet.next_header(), packet.payload())
            }
            _ => None,
        }
    }

    fn payload(&mut self, time: Duration, path: &Path, protocol: IpProtocol, bytes: &[u8]) -> Option<()> {
        match protocol {
            IpProtocol::Udp => {
                let datagram = UdpPacket::new_checked(bytes).ok()?;
                if datagram.src_port() == DHCP_SERVER || datagram.dst_port() == DHCP_SERVER {
                    self.traffic.dhcp += 1;
                    self.traffic.dhcp_before += usize::from(self.first.is_none());
                }
            }
            IpProtocol::Tcp => self.segment(time, path, &TcpPacket::new_checked(bytes).ok()?),
            _ => {}
        }
        Some(())
    }

    fn segment(&mut self, time: Duration, path: &Path, segment: &TcpPacket<&[u8]>) {
        let text = String::from_utf8_lossy(segment.payload());
        let line = text.lines().next().unwrap_or_default();
        let sequence = segment.seq_number().0;
        if segment.dst_port() == HTTP {
            let peer = (path.to, segment.src_port());
            let repeated_syn = segment.syn() && !self.opened.insert((peer, sequence));
            let request = line.strip_suffix(" HTTP/1.1");
            let repeated_request = request.is_some() && !self.requested.insert((peer, sequence));
            if repeated_syn || repeated_request {
                self.traffic.repeated += 1;
            } else if let Some(request) = request {
                let at = time.saturating_sub(*self.first.get_or_insert(time));
                self.asked.insert(peer, self.traffic.exchanges.len());
                self.traffic.exchanges.push(Exchange {
                    request: request.to_owned(),
                    server: path.to,
                    answer: None,
                    at,
                    took: Duration::ZERO,
                    hops: 0,
                });
            }
        } else if segment.src_port() == HTTP && line.starts_with("HTTP/1.") {
            let asked = self.asked.remove(&(path.from, segment.dst_port()));
            if let (Some(place), Some(first)) = (asked, self.first) {
                let exchange = &mut self.traffic.exchanges[place];
                exchange.answer = Some(line.to_owned());
                exchange.took = time.saturating_sub(first + exchange.at);
                exchange.hops = path.hops;
            }
        }
    }

    fn without_prefix<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        PREFIXES.iter().find_map(|len| {
            let frame = bytes.get(*len..)?;
            let own = frame.get(..6)? == self.nic.0 || frame.get(6..12)? == self.nic.0;
            let broadcast = frame.get(..6)? == [0xff; 6];
            (own || broadcast).then_some(frame)
        })
    }
}

// Compares a boot with its record and its dialect.

/// Messages of one DHCP exchange: discover, offer, request, acknowledge (RFC 2131, section 3.1).
const DHCP_EXCHANGE: usize = 4;

/// The most requests or warnings that a finding names. The output below it, or the logs, have all of them.
const NAMED: usize = 3;

/// One checked expectation.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) what: &'static str,
    pub(super) found: String,
    pub(super) holds: bool,
}

/// Checks a boot against all expectations.
pub(super) fn findings(subject: &BootSubject, outcome: &BootOutcome) -> Vec<Finding> {
    let (report, traffic) = (&outcome.report, &outcome.traffic);
    let expected = subject.dialect.expected();
    let datasource = report.datasource().unwrap_or("none: cloud-init wrote no result");
    let uuid = report.firmware.get("product_uuid").map_or("none", String::as_str);
    let errors = match report.errors() {
        Some(errors) => errors.join("; "),
        None => "unknown".to_owned(),
    };
    let unfinished = report.unfinished();
    let holders = report.authorized_keys.iter().filter(|(_, keys)| keys.contains(subject.ssh_key));
    let holders: Vec<_> = holders.map(|(path, _)| path.as_str()).collect();
    let marker = report.marker.as_deref().map_or("no effect", str::trim_end);
    let (warnings, _) = report.warnings();
    let mut findings = vec![
        finding("system UUID", uuid, uuid.eq_ignore_ascii_case(subject.uuid)),
        finding("datasource", datasource, datasource.starts_with(expected.datasource)),
        finding("cloud-id", or(&report.cloud_id, "none"), report.cloud_id == expected.cloud_id),
        finding("stages not done", or(&unfinished.join(", "), "none"), unfinished.is_empty()),
        finding("errors", or(&errors, "none"), errors.is_empty()),
        finding("warnings", &listed(warnings.len(), &warnings), warnings.is_empty()),
        finding("instance-id", &report.instance_id, report.instance_id == subject.instance_id()),
        finding("hostname", &report.hostname, report.hostname == subject.hostname),
        finding("ssh key in", or(&holders.join(", "), "no file"), !holders.is_empty()),
        finding("user-data", marker, marker == subject.marker),
        network(subject, outcome),
        requests(traffic, expected.asked),
        retries(outcome, expected.twice),
        finding(
            "DHCP",
            &format!("{} messages passed, {} before the first request", traffic.dhcp, traffic.dhcp_before),
            traffic.dhcp_before >= DHCP_EXCHANGE,
        ),
    ];
    findings.extend(expected.token.map(|token| token_stays(&traffic.exchanges, token)));
    findings
}

/// Checks the hop limits. An answer with a token has the record's hop limit, which is 1, so that a router behind the
/// guest drops it. Other answers have an ordinary hop limit.
fn token_stays(exchanges: &[Exchange], token: &str) -> Finding {
    let (tokens, others): (Vec<_>, Vec<_>) = exchanges.iter().partition(|one| one.request == token);
    let least = |exchanges: &[&Exchange]| exchanges.iter().map(|one| one.hops).min().unwrap_or_default();
    let most = tokens.iter().map(|one| one.hops).max().unwrap_or_default();
    let (own, other) = (least(&tokens), least(&others));
    let found = format!("{own} with the token, at least {other} without");
    finding("hop limit", &found, own == 1 && most == 1 && other > 1)
}

/// Checks the address and the source of its configuration.
fn network(subject: &BootSubject, outcome: &BootOutcome) -> Finding {
    let expected = subject.dialect.expected().network.word();
    let (address, source) = (outcome.report.address(), outcome.report.network_source());
    let shown = address.map_or_else(|| "no address".to_owned(), |address| address.to_string());
    let holds = address == Some(subject.address()) && source == Some(expected);
    let found = format!("{shown}, configured from {}", source.unwrap_or("no source"));
    let wanted = format!("; expected {} from {expected}", subject.address());
    finding("network", &format!("{found}{}", if holds { "" } else { &wanted }), holds)
}

/// Checks that all expected requests were made, and that all requests succeeded. The record has every document.
fn requests(traffic: &Traffic, asked: &[&str]) -> Finding {
    let refused: Vec<_> = traffic.exchanges.iter().filter(|exchange| !exchange.answered_well()).collect();
    let refused: Vec<_> = refused.iter().map(|exchange| exchange.request.as_str()).collect();
    let made = |request: &&str| traffic.exchanges.iter().any(|exchange| exchange.request == *request);
    let missed: Vec<_> = asked.iter().copied().filter(|request| !made(request)).collect();
    let found = format!(
        "{} made, {} without a good answer, {} expected and not made",
        traffic.exchanges.len(),
        listed(refused.len(), &refused),
        listed(missed.len(), &missed),
    );
    finding("requests", &found, refused.is_empty() && missed.is_empty())
}

/// Checks that cloud-init neither slept nor repeated a request.
fn retries(outcome: &BootOutcome, twice: &[&str]) -> Finding {
    let (sleep, attempts) = (outcome.report.retry_sleep(), outcome.report.further_attempts());
    let again = asked_again(&outcome.traffic.exchanges, twice);
    let found = format!(
        "{} s slept, {attempts} further attempts, {} repeated requests",
        sleep.as_secs_f64(),
        listed(again.len(), &again)
    );
    finding("retries", &found, sleep.is_zero() && attempts == 0 && again.is_empty())
}

/// Returns the requests that were made more often than cloud-init makes them by itself.
fn asked_again<'a>(exchanges: &'a [Exchange], twice: &[&str]) -> Vec<&'a str> {
    let mut times = BTreeMap::<_, usize>::new();
    for exchange in exchanges {
        *times.entry(exchange.request.as_str()).or_default() += 1;
    }
    let allowed = |request: &str| if twice.contains(&request) { 2 } else { 1 };
    times
        .into_iter()
        .filter(|(request, times)| *times > allowed(request))
        .map(|(request, _)| request)
        .collect()
}

impl Exchange {
    fn is_about_events(&self) -> bool {
        self.request.split(' ').nth(1).is_some_and(|target| target.starts_with(EVENTS))
    }

    /// Whether the answer's status is a success.
    pub(super) fn answered_well(&self) -> bool {
        let status = self.answer.as_deref().and_then(|line| line.split(' ').nth(1));
        status.is_some_and(|status| status.starts_with('2'))
    }
}

pub(super) fn finding(what: &'static str, found: &str, holds: bool) -> Finding {
    Finding { what, found: found.to_owned(), holds }
}

/// Formats a number with the first few names that it counts, each once.
fn listed(count: usize, what: &[&str]) -> String {
    let mut different: Vec<_> = what.to_vec();
    let mut seen = BTreeSet::new();
    different.retain(|name| seen.insert(*name));
    match different.get(..NAMED) {
        _ if different.is_empty() => count.to_string(),
        Some(first) if different.len() > NAMED => format!("{count} ({}, …)", first.join(", ")),
        _ => format!("{count} ({})", different.join(", ")),
    }
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

#[cfg(test)]
mod tests {
    use metadata_common::mac::Mac;
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::time::Duration;

    use super::{Exchange, FILE_HEADER, MAGIC, Traffic, asked_again, listed, read, requests, token_stays};

    const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    const NIC: Mac = Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]);

    /// Makes a TCP segment between guest and metadata address, without a checksum, as with offloads.
    fn segment(to_server: bool, port: u16, flags: u8, payload: &str) -> Vec<u8> {
        let (guest, server) = ([10, 0, 2, 15], [169, 254, 169, 254]);
        let mut frame = if to_server { [[2; 6], NIC.0] } else { [NIC.0, [2; 6]] }.concat();
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend((40 + payload.len() as u16).to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, 6, 0, 0]);
        frame.extend(if to_server { [guest, server] } else { [server, guest] }.concat());
        let ports = if to_server { [port, 80] } else { [80, port] };
        frame.extend(ports.into_iter().flat_map(u16::to_be_bytes));
        frame.extend([0, 0, 0, 7, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(payload.bytes());
        frame
    }

    fn dump(prefix: usize, frames: &[Vec<u8>]) -> Vec<u8> {
        let mut file = MAGIC.to_le_bytes().to_vec();
        file.resize(FILE_HEADER, 0);
        for (number, frame) in (0u32..).zip(frames) {
            let len = (prefix + frame.len()) as u32;
            file.extend([1, number * 100, len, len].into_iter().flat_map(u32::to_le_bytes));
            file.extend(vec![0; prefix]);
            file.extend(frame);
        }
        file
    }

    /// Makes the same segment over IPv6.
    fn segment_v6(to_server: bool, port: u16, payload: &str) -> Vec<u8> {
        let v4 = segment(to_server, port, 0x18, payload);
        let ends = [[0xfd; 16], SERVER_V6.octets()];
        let [from, to] = if to_server { ends } else { [ends[1], ends[0]] };
        let (ethernet, tcp) = (&v4[..12], &v4[34..]);
        let len = (tcp.len() as u16).to_be_bytes();
        [ethernet, &[0x86, 0xdd, 0x60, 0, 0, 0], &len, &[6, 64], &from, &to, tcp].concat()
    }

    #[test]
    fn requests_and_answers_are_paired_with_any_frame_prefix() {
        let frames = [
            segment(true, 4000, 0x02, ""),
            segment(true, 4000, 0x02, ""),
            segment(true, 4000, 0x18, "GET /v1/meta-data HTTP/1.1\r\nHost: x\r\n\r\n"),
            segment(true, 4000, 0x18, "GET /v1/meta-data HTTP/1.1\r\nHost: x\r\n\r\n"),
            segment(false, 4000, 0x18, "HTTP/1.1 200 OK\r\n\r\n"),
            segment(true, 4001, 0x18, "GET /v1/user-data HTTP/1.1\r\n\r\n"),
            segment(true, 4002, 0x18, "GET /v1/events?incarnation=1 HTTP/1.1\r\n\r\n"),
        ];
        for prefix in [0, 10, 12] {
            let traffic = read(&dump(prefix, &frames), NIC).expect("a dump");
            let answered = Exchange {
                request: "GET /v1/meta-data".into(),
                server: Ipv4Addr::new(169, 254, 169, 254).into(),
                answer: Some("HTTP/1.1 200 OK".into()),
                at: Duration::ZERO,
                took: Duration::from_micros(200),
                hops: 64,
            };
            assert_eq!(traffic.exchanges.len(), 2, "{prefix}");
            assert_eq!(traffic.exchanges[0], answered, "{prefix}");
            assert_eq!(traffic.exchanges[1].answer, None, "{prefix}");
            assert_eq!(traffic.exchanges[1].at, Duration::from_micros(300), "{prefix}");
            assert_eq!((traffic.connections, traffic.repeated), (1, 2), "{prefix}");
            let [events] = &traffic.events[..] else { panic!("{prefix}: {traffic:?}") };
            assert_eq!(events.request, "GET /v1/events?incarnation=1", "{prefix}");
        }
    }

    #[test]
    fn exchanges_over_ipv4_and_ipv6_are_kept_apart() {
        let frames = [
            segment(true, 4000, 0x18, "PUT /latest/api/token HTTP/1.1\r\n\r\n"),
            segment_v6(true, 4000, "PUT /latest/api/token HTTP/1.1\r\n\r\n"),
            segment_v6(false, 4000, "HTTP/1.1 200 OK\r\n\r\n"),
        ];
        let traffic = read(&dump(0, &frames), NIC).expect("a dump");
        let [v4, v6] = &traffic.exchanges[..] else { panic!("{traffic:?}") };
        assert_eq!((v4.answer.as_deref(), v6.answer.as_deref()), (None, Some("HTTP/1.1 200 OK")));
        assert_eq!(v6.server, SERVER_V6);
    }

    #[test]
    fn a_truncated_dump_gives_its_complete_records() {
        let whole = dump(0, &[segment(true, 1, 0x18, "GET / HTTP/1.1\r\n"), segment(true, 2, 0x02, "")]);
        for len in FILE_HEADER..whole.len() {
            let traffic = read(&whole[..len], NIC).expect("a dump");
            assert_eq!(traffic.connections, 0, "{len}");
        }
        assert!(read(b"not a dump at all, whatever its length", NIC).is_err());
    }

    fn exchange(request: &str, answer: Option<&str>) -> Exchange {
        Exchange {
            request: request.to_owned(),
            server: Ipv4Addr::LOCALHOST.into(),
            answer: answer.map(str::to_owned),
            at: Duration::ZERO,
            took: Duration::ZERO,
            hops: 64,
        }
    }

    #[test]
    fn only_a_success_is_a_good_answer() {
        for good in ["HTTP/1.1 200 OK", "HTTP/1.1 204 No Content"] {
            assert!(exchange("GET /", Some(good)).answered_well(), "{good}");
        }
        for bad in [None, Some("HTTP/1.1 404 Not Found"), Some(""), Some("HTTP/1.1")] {
            assert!(!exchange("GET /", bad).answered_well(), "{bad:?}");
        }
    }

    #[test]
    fn a_request_made_more_often_than_expected_is_a_retry() {
        let requests = ["GET /openstack", "GET /a", "GET /openstack", "GET /b"];
        let exchanges: Vec<_> = requests.iter().map(|request| exchange(request, None)).collect();
        assert!(asked_again(&exchanges, &["GET /openstack"]).is_empty());
        assert_eq!(asked_again(&exchanges, &["GET /a"]), ["GET /openstack"]);
        let thrice = [exchanges.clone(), exchanges].concat();
        assert_eq!(asked_again(&thrice, &["GET /openstack", "GET /a"]), ["GET /b", "GET /openstack"]);
    }

    #[test]
    fn only_the_answer_with_the_token_has_hop_limit_1() {
        let answered = |request, hops| Exchange { hops, ..exchange(request, Some("HTTP/1.1 200 OK")) };
        let cases = [(1, 64, true), (64, 64, false), (1, 1, false), (0, 64, false)];
        for (token, other, holds) in cases {
            let exchanges = [answered("PUT /t", token), answered("GET /a", other), answered("GET /b", 64)];
            assert_eq!(token_stays(&exchanges, "PUT /t").holds, holds, "{token} {other}");
        }
        assert!(!token_stays(&[answered("GET /a", 64)], "PUT /t").holds);
    }

    #[test]
    fn a_finding_names_a_few_requests_each_once() {
        assert_eq!(listed(0, &[]), "0");
        assert_eq!(listed(3, &["a", "b", "a"]), "3 (a, b)");
        assert_eq!(listed(5, &["a", "b", "c", "d", "a"]), "5 (a, b, c, …)");
    }

    #[test]
    fn a_refused_or_missing_request_is_named() {
        let ok = Some("HTTP/1.1 200 OK");
        let exchanges = vec![exchange("GET /a", ok), exchange("GET /b", Some("HTTP/1.1 404 Not Found"))];
        let traffic = Traffic { exchanges, ..Traffic::default() };
        let found = requests(&traffic, &["GET /a", "GET /c"]);
        assert_eq!(
            (found.holds, found.found.as_str()),
            (false, "2 made, 1 (GET /b) without a good answer, 1 (GET /c) expected and not made")
        );
        let traffic = Traffic { exchanges: vec![exchange("GET /a", ok)], ..Traffic::default() };
        assert!(requests(&traffic, &["GET /a"]).holds);
    }
}
