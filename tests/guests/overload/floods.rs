//! Floods of frames, sent as fast as the tap accepts them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Result, ensure};
use metadata_base::addresses::METADATA_LINK_LOCAL;
use metadata_common::mac::Mac;
use metadata_common::wire::{arp, ethernet, ipv4, protocol};
use smoltcp::wire::TcpControl;
use support::agent::Agent;
use support::frames::{self, SERVED_V4, SERVED_V6, SOLICITED, with};
use support::raw::Segment;
use support::station::Station;

use super::Attack;
use super::SERVICE;
use super::withstand;

/// Frames of one flood, which fill a token bucket several times.
const FRAMES: usize = 20_000;
/// Garbled frames of one flood; most of them have no valid destination.
const GARBAGE: usize = 100_000;
/// Number of frames after which the guest reads the answers.
const BURST: usize = 64;

/// Sends `count` frames and receives the answers, which must not have more bytes than the frames.
fn flood(station: &mut Station, count: usize, make: impl Fn(&Station, usize) -> Vec<u8>) -> Result<()> {
    let (sent, heard) = (station.sent.get().1, station.received.1);
    for number in 0..count {
        station.send(&make(station, number))?;
        if number % BURST == 0 {
            station.receive()?;
        }
    }
    station.receive()?;
    let (sent, heard) = (station.sent.get().1 - sent, station.received.1 - heard);
    ensure!(heard <= sent, "{heard} bytes of answers to {sent} bytes");
    Ok(())
}

/// A segment to the service from a random address and port.
fn any(v6: bool, control: TcpControl) -> Segment {
    let (from, to): (IpAddr, IpAddr) = if v6 {
        (Ipv6Addr::from_bits(fastrand::u128(..) >> 16 | 0xfe80 << 112).into(), METADATA_LINK_LOCAL.into())
    } else {
        (Ipv4Addr::from_bits(fastrand::u32(..) >> 8 | 10 << 24).into(), SERVICE.0)
    };
    Segment {
        to: Mac::SERVICE,
        source: (from, fastrand::u16(1..)),
        destination: (to, 80),
        window: fastrand::u16(..),
        control,
        ..Segment::ack(0, fastrand::u32(..), fastrand::u32(..))
    }
}

fn opening(v6: bool) -> Segment {
    Segment { ack: None, mss: Some(1400), ..any(v6, TcpControl::Syn) }
}

/// A frame for the service with random bytes changed, removed or appended.
fn garbled(station: &Station) -> Vec<u8> {
    let whole = match fastrand::u8(..4) {
        0 => frames::frame(&[], ethernet::IPV4, &frames::tcp(SERVED_V4, fastrand::u8(..))),
        1 => frames::frame(&[], ethernet::IPV6, &frames::tcp6(SERVED_V6, fastrand::u8(..))),
        2 => frames::frame(&[], ethernet::ARP, &frames::arp_request(SERVED_V4)),
        _ => frames::frame(&[], ethernet::IPV6, &frames::introduced(SOLICITED, SERVED_V6)),
    };
    let mut frame = with(whole, ethernet::SOURCE, &station.mac.0);
    for _ in 0..fastrand::usize(1..6) {
        let at = fastrand::usize(ethernet::HEADER..frame.len());
        frame[at] = fastrand::u8(..);
    }
    frame.truncate(fastrand::usize(ethernet::HEADER..=frame.len()));
    let more = if fastrand::bool() { fastrand::usize(..1_200) } else { 0 };
    frame.extend(std::iter::repeat_with(|| fastrand::u8(..)).take(more));
    frame
}

fn syns(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&opening(false)))
}

fn syns_v6(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&opening(true)))
}

fn syns_to_closed_ports(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, number| {
        let closed = Segment { destination: (SERVICE.0, number as u16 | 0x8000), ..opening(false) };
        station.frame(&closed)
    })
}

fn resets(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::Rst)))
}

fn fins(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::Fin)))
}

fn acks(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::None)))
}

fn acks_v6(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(true, TcpControl::None)))
}

fn unknown_payload(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| station.frame(&any(false, TcpControl::None).with(&[b'x'; 1_400])))
}

fn arps(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| {
        let request = with(frames::arp_request(SERVED_V4), arp::SENDER_IP, &fastrand::u32(..).to_be_bytes());
        with(frames::frame(&[], ethernet::ARP, &request), ethernet::SOURCE, &station.mac.0)
    })
}

fn solicitations(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| {
        let packet = frames::introduced(SOLICITED, SERVED_V6);
        with(frames::frame(&[], ethernet::IPV6, &packet), ethernet::SOURCE, &station.mac.0)
    })
}

fn pings(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, number| {
        let mut packet = frames::datagram(SERVED_V4, protocol::ICMP);
        packet[ipv4::HEADER] = 8;
        packet[ipv4::HEADER + 6..ipv4::HEADER + 8].copy_from_slice(&(number as u16).to_be_bytes());
        with(frames::frame(&[], ethernet::IPV4, &packet), ethernet::SOURCE, &station.mac.0)
    })
}

fn unknown_macs(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |station, _| {
        let [a, b, c, d] = fastrand::u32(..).to_be_bytes();
        with(station.frame(&opening(false)), ethernet::SOURCE, &[0x52, 0x54, a, b, c, d])
    })
}

fn garbage(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, GARBAGE, |station, _| garbled(station))
}

fn noise(station: &mut Station, _: &Agent<'_>) -> Result<()> {
    flood(station, FRAMES, |_, _| {
        let length = fastrand::usize(14..1_514);
        // The destination is unicast, so that no other guest receives the frame.
        let mut frame: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(length).collect();
        frame[0] &= 0xfe;
        // The kernel drops a frame with a truncated VLAN tag before a classifier sees it.
        if matches!(frame[12..14], [0x81, 0] | [0x88, 0xa8]) {
            frame[13] ^= 1;
        }
        frame
    })
}

fn attacks() -> Vec<Attack> {
    let attack = |name, run| Attack { name, run, leaves: false };
    vec![
        attack("a syn flood from any address", syns),
        attack("a syn flood by ipv6", syns_v6),
        attack("a syn flood to closed ports", syns_to_closed_ports),
        attack("a storm of resets", resets),
        attack("a storm of fins", fins),
        attack("a storm of acknowledgements", acks),
        attack("a storm of acknowledgements by ipv6", acks_v6),
        attack("payload on unknown connections", unknown_payload),
        attack("an arp flood", arps),
        attack("a flood of solicitations", solicitations),
        attack("a ping flood", pings),
        attack("a flood from any mac", unknown_macs),
        Attack { leaves: true, ..attack("garbled frames", garbage) },
        Attack { leaves: true, ..attack("noise", noise) },
    ]
}

#[test]
fn floods_starve_only_their_sender_with_xdp() {
    withstand("floods, xdp", "steer: xdp\n", &attacks());
}

#[test]
fn floods_starve_only_their_sender_with_tcx() {
    withstand("floods, tcx", "steer: tcx\n", &attacks());
}
