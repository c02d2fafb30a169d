//! Writes a trace to a pcapng file (draft-ietf-opsawg-pcapng) that only its owner can read.

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::{DataLink, PcapError};
use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use super::print::verdict;
use metadata_control::trace::wire::{TracedFrame, bytes};

/// `if_tsresol`: timestamps are nanoseconds.
const NANOSECONDS: u8 = 9;
/// Values of `epb_flags`: the direction, as seen from the node.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
const MODE: u32 = 0o600;

/// An open pcapng file.
pub(super) struct Capture {
    writer: PcapNgWriter<BufWriter<File>>,
    /// The time of day minus the kernel's monotonic time, in nanoseconds.
    unix_offset: i128,
    /// Frames lost since the last written frame.
    lost: u64,
}

impl Capture {
    /// Creates the file. Fails if it exists.
    pub(super) fn create(path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)
    }

    /// Writes the file's head. `monotonic_ns` and `unix_ns` are the same moment.
    pub(super) fn begin(file: File, who: &str, monotonic_ns: u64, unix_ns: u64) -> io::Result<Self> {
        let mut writer = PcapNgWriter::new(BufWriter::new(file)).map_err(io_error)?;
        let options = vec![
            InterfaceDescriptionOption::IfName(Cow::Borrowed(who)),
            InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
        ];
        let snaplen = u32::try_from(metadata_common::trace::BYTES).unwrap_or_default();
        let interface = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen, options };
        writer.write_pcapng_block(interface.into_owned()).map_err(io_error)?;
        Ok(Self { writer, unix_offset: i128::from(unix_ns) - i128::from(monotonic_ns), lost: 0 })
    }

    pub(super) fn lose(&mut self, frames: u64) {
        self.lost = self.lost.saturating_add(frames);
    }

    pub(super) fn frame(&mut self, frame: &TracedFrame) -> io::Result<()> {
        let data = bytes(&frame.bytes).unwrap_or_default();
        let unix_ns = u64::try_from(i128::from(frame.time_ns) + self.unix_offset).unwrap_or_default();
        let comment = format!("{} ({})", frame.verdict, verdict(&frame.verdict));
        let mut options = vec![
            EnhancedPacketOption::Comment(comment.into()),
            EnhancedPacketOption::Flags(if frame.to_guest { OUTBOUND } else { INBOUND }),
        ];
        let lost = std::mem::take(&mut self.lost);
        if lost > 0 {
            options.push(EnhancedPacketOption::DropCount(lost));
        }
        let packet = EnhancedPacketBlock {
            interface_id: 0,
            timestamp: Duration::from_nanos(unix_ns),
            original_len: frame.length,
            data: data.into(),
            options,
        };
        self.writer.write_pcapng_block(packet).map_err(io_error).map(drop)
    }

    pub(super) fn end(self) -> io::Result<()> {
        self.writer.into_inner().flush()
    }
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::Capture;
    use metadata_control::trace::wire::TracedFrame;
    use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
    use pcap_file::pcapng::{Block, PcapNgReader};
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_private_capture_reads_back_with_its_verdicts_and_losses() {
        let room = tempfile::tempdir().expect("a directory");
        let path = room.path().join("trace.pcapng");
        let file = Capture::create(&path).expect("a file");
        assert_eq!(file.metadata().expect("it is there").permissions().mode() & 0o777, 0o600);
        Capture::create(&path).expect_err("nothing is overwritten");
        let mut capture = Capture::begin(file, "tap0", 1_000, 5_000_001_000).expect("begun");
        let frame = TracedFrame {
            time_ns: 3_000,
            verdict: "drop_vlan".into(),
            length: 99,
            bytes: "00ff10".into(),
            ..TracedFrame::default()
        };
        capture.frame(&frame).expect("written");
        capture.lose(7);
        capture.frame(&TracedFrame { to_guest: true, ..frame }).expect("written");
        capture.end().expect("ended");

        let mut reader = PcapNgReader::new(std::fs::File::open(&path).expect("a file")).expect("pcapng");
        let mut packets = Vec::new();
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.expect("a block") {
                packets.push(packet.into_owned());
            }
        }
        let [first, second] = &packets[..] else { panic!("{packets:?}") };
        assert_eq!((first.timestamp.as_nanos(), first.original_len), (5_000_003_000, 99));
        assert_eq!(first.data[..], [0, 0xff, 0x10]);
        let comment = EnhancedPacketOption::Comment("drop_vlan (DROPPED: vlan)".into());
        assert_eq!(first.options, [comment.clone(), EnhancedPacketOption::Flags(1)]);
        assert_eq!(
            second.options,
            [comment, EnhancedPacketOption::Flags(2), EnhancedPacketOption::DropCount(7)]
        );
    }
}
