//! Payloads as text, for documents that cannot carry other bytes.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::record::vm::Payload;

/// First bytes of gzip (RFC 1952 section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Returns a payload as text: UTF-8 unchanged, gzip as a MIME part in base64, which cloud-init unpacks to the same
/// content; `None` for other bytes.
pub(super) fn text_form(bytes: &[u8]) -> Option<Cow<'_, str>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text.into()),
        Err(_) if bytes.starts_with(&GZIP) => {
            let head =
                "MIME-Version: 1.0\nContent-Type: application/gzip\nContent-Transfer-Encoding: base64\n\n";
            Some(format!("{head}{}\n", STANDARD.encode(bytes)).into())
        }
        Err(_) => None,
    }
}

/// Returns a payload in [`text_form`]; empty text if there is no payload or it has no such form, of which validation
/// warns. Returns `None` until the payload's source has been read.
pub(super) fn payload_text(payload: Option<&Payload>) -> Option<String> {
    let Some(payload) = payload else { return Some(String::new()) };
    let bytes = payload.bytes()?;
    Some(text_form(&bytes).map(Cow::into_owned).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::{payload_text, text_form};
    use crate::record::vm::Payload;
    use bytes::Bytes;

    #[test]
    fn text_stays_gzip_is_wrapped_and_other_bytes_have_no_form() {
        assert_eq!(text_form("#é\n".as_bytes()).as_deref(), Some("#é\n"));
        let wrapped = "MIME-Version: 1.0\nContent-Type: application/gzip\n\
                       Content-Transfer-Encoding: base64\n\nH4sI\n";
        assert_eq!(text_form(&[0x1f, 0x8b, 0x08]).as_deref(), Some(wrapped));
        assert_eq!(text_form(&[0xff, 0xfe]), None);
    }

    #[test]
    fn a_payload_that_is_absent_or_has_no_text_form_is_empty() {
        let payload = |bytes: &'static [u8]| Payload::from(Bytes::from_static(bytes));
        assert_eq!(payload_text(None).as_deref(), Some(""));
        assert_eq!(payload_text(Some(&payload(b"\xff\xfe"))).as_deref(), Some(""));
        assert_eq!(payload_text(Some(&payload(b"#x\n"))).as_deref(), Some("#x\n"));
    }
}
