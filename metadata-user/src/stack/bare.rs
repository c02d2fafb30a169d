//! Segments of ours without payload, for the two cases smoltcp does not send them.

use smoltcp::wire::{IpProtocol, IpRepr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber};

use super::config::RECEIVE_BUFFER;
use super::connection::Tuple;
use super::frame::{ETHERNET, Route, checksums};
use super::reach::HOP_LIMIT;

/// Builds a frame with one segment numbered `seq` that acknowledges `ack`. Returns its length.
pub(super) fn emit(
    tuple: &Tuple,
    route: Route,
    control: TcpControl,
    (seq, ack): (u32, u32),
    frame: &mut [u8],
) -> usize {
    let ((remote, remote_port), (local, local_port)) = (tuple.remote, tuple.local);
    let segment = TcpRepr {
        src_port: local_port,
        dst_port: remote_port,
        control,
        seq_number: TcpSeqNumber(seq as i32),
        ack_number: Some(TcpSeqNumber(ack as i32)),
        window_len: RECEIVE_BUFFER as u16,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ip = IpRepr::new(local.into(), remote.into(), IpProtocol::Tcp, segment.buffer_len(), HOP_LIMIT);
    let header = ETHERNET + ip.header_len();
    let length = header + segment.buffer_len();
    ip.emit(&mut frame[ETHERNET..length], &checksums());
    let mut packet = TcpPacket::new_unchecked(&mut frame[header..length]);
    segment.emit(&mut packet, &local.into(), &remote.into(), &checksums());
    route.emit_ip(&mut frame[..length]);
    length
}
