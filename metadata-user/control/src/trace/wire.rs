//! The lines of a trace as the agent writes them: `GET /v1/trace` on the control socket sends one JSON object per line.
//!
//! An empty line shows that the agent is still alive. A reader ignores lines of a kind it does not know.

use serde::{Deserialize, Serialize};

/// The version of the format.
pub const SCHEMA: &str = "trace/1";

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TraceLine {
    /// The first line.
    Begin {
        /// [`SCHEMA`].
        schema: String,
        /// A description of the traced guests.
        who: String,
        /// A description of what the trace misses.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unseen: Option<String>,
        /// Why the guests get no answers, if the agent knows it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
        /// The kernel's monotonic clock in nanoseconds, at the start.
        monotonic_ns: u64,
        /// The time of day at the start, in nanoseconds since 1970.
        unix_ns: u64,
    },
    /// A frame.
    Frame(TracedFrame),
    /// Frames lost before the next line, because the buffer was full.
    Lost {
        /// The number of lost frames.
        frames: u64,
    },
    /// The last line, if the agent ends the trace.
    End {
        /// The reason.
        reason: String,
    },
}

/// A frame and its verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedFrame {
    /// The time of the frame on the kernel's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// True for a frame to the guest, false for one from it.
    pub to_guest: bool,
    /// The verdict by its name in the metrics.
    pub verdict: String,
    /// Length of the whole frame in bytes.
    pub length: u32,
    /// The port in the form of the command line; `None` for a frame from user space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The guest's MAC.
    pub mac: String,
    /// The frame's headers, or everything captured if the reader asked for it, in hexadecimal.
    pub bytes: String,
    /// The request or status line, if a message starts in the captured bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Parses hexadecimal digits; `None` for any other text.
#[must_use]
pub fn bytes(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    pairs
        .map(|pair| {
            u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?, 16).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{TraceLine, TracedFrame, bytes};
    use metadata_common::printable::hex;

    #[test]
    fn lines_keep_their_form() {
        let frame = TracedFrame {
            time_ns: 7,
            verdict: "steer_arp".into(),
            length: 42,
            mac: "m".into(),
            bytes: "00ff".into(),
            ..TracedFrame::default()
        };
        let cases = [
            (TraceLine::Lost { frames: 3 }, r#"{"kind":"lost","frames":3}"#),
            (
                TraceLine::Frame(frame),
                r#"{"kind":"frame","time_ns":7,"to_guest":false,"verdict":"steer_arp","length":42,"mac":"m","bytes":"00ff"}"#,
            ),
        ];
        for (line, text) in cases {
            assert_eq!(serde_json::to_string(&line).expect("JSON"), text);
            assert_eq!(serde_json::from_str::<TraceLine>(text).expect("a line"), line);
        }
    }

    #[test]
    fn only_hexadecimal_digits_are_parsed_as_bytes() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes(&hex(&all)), Some(all));
        for bad in ["0", "0g", "zz", "é"] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
    }
}
