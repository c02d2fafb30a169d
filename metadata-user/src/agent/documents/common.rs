//! Common documents: one in the kernel's table for an answer of many VMs, in place of one for each VM.
//!
//! Two VMs in a row that answer a request alike make the answer a common document. From then on a VM with the same
//! answer only has a bit set, and one with another answer has a document of its own.

use metadata_common::maps::{DocumentKey, MAX_COMMON_DOCUMENTS};
use metadata_content::http::Response;
use metadata_content::store::Datasource;
use std::hash::BuildHasher as _;
use std::sync::Arc;

use super::PublishedBody;

/// What is known of the VMs' answers to a learned request.
#[derive(Default)]
pub(super) enum CommonAnswer {
    /// Nothing.
    #[default]
    Unknown,
    /// The hash of the last VM's answer.
    Seen(u64),
    /// The answer is published.
    Published(CommonDocument),
}

/// A published answer of several VMs.
pub(super) struct CommonDocument {
    pub(super) key: DocumentKey,
    pub(super) response: Response,
    pub(super) datasource: Datasource,
    pub(super) index: u16,
    pub(super) body: Arc<PublishedBody>,
}

/// What to do with the answer of one more VM.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextAnswer {
    /// It is the common document of this index.
    Common(u16),
    /// It can become a common document: the VM before had the same.
    Repeated,
    /// It is the VM's own.
    Own,
}

impl CommonAnswer {
    /// Compares the answer of the next VM, and notes it.
    pub(super) fn next(
        &mut self,
        hasher: &std::hash::RandomState,
        response: &Response,
        datasource: Datasource,
    ) -> NextAnswer {
        if let Self::Published(common) = self {
            let is_same = common.datasource == datasource && common.response == *response;
            return if is_same { NextAnswer::Common(common.index) } else { NextAnswer::Own };
        }
        let hash = hasher.hash_one((response, datasource));
        let is_repeated = matches!(self, Self::Seen(last) if *last == hash);
        *self = Self::Seen(hash);
        if is_repeated { NextAnswer::Repeated } else { NextAnswer::Own }
    }
}

/// The indices that no common document has.
#[derive(Default)]
pub(super) struct CommonIndices {
    free: Vec<u16>,
    /// Lowest index that was never used.
    next: u16,
}

impl CommonIndices {
    /// An index for a document; `None` if all are used.
    pub(super) fn take(&mut self) -> Option<u16> {
        if let Some(index) = self.free.pop() {
            return Some(index);
        }
        let index = self.next;
        (index < MAX_COMMON_DOCUMENTS).then(|| self.next += 1)?;
        Some(index)
    }

    /// Frees indices. No program of the kernel may use their documents any more.
    pub(super) fn free(&mut self, indices: Vec<u16>) {
        self.free.extend(indices);
    }
}

#[cfg(test)]
mod tests {
    use super::{CommonAnswer, CommonDocument, CommonIndices, NextAnswer, PublishedBody};
    use metadata_common::maps::{DocumentKey, MAX_COMMON_DOCUMENTS};
    use metadata_content::http::{Response, StatusCode};
    use metadata_content::store::Datasource;
    use metadata_steer::BodyKey;
    use std::hash::RandomState;
    use std::sync::Arc;

    fn response(body: &'static str) -> Response {
        Response::new(StatusCode(200), Some("text/plain"), &[], body)
    }

    #[test]
    fn an_answer_is_common_once_two_vms_in_a_row_give_it() {
        let (hasher, mut common) = (RandomState::new(), CommonAnswer::default());
        let datasource = Datasource::named("nocloud");
        for (body, expected) in [
            ("a", NextAnswer::Own),
            ("b", NextAnswer::Own),
            ("a", NextAnswer::Own),
            ("a", NextAnswer::Repeated),
        ] {
            assert_eq!(common.next(&hasher, &response(body), datasource), expected, "{body}");
        }
        common = CommonAnswer::Published(CommonDocument {
            key: DocumentKey::common(1),
            response: response("a"),
            datasource,
            index: 7,
            body: Arc::new(PublishedBody { key: BodyKey::default() }),
        });
        for (body, expected) in
            [("a", NextAnswer::Common(7)), ("b", NextAnswer::Own), ("a", NextAnswer::Common(7))]
        {
            assert_eq!(common.next(&hasher, &response(body), datasource), expected, "{body}");
        }
    }

    #[test]
    fn an_index_is_given_again_only_after_it_was_freed() {
        let mut indices = CommonIndices::default();
        let all: Vec<_> = std::iter::from_fn(|| indices.take()).collect();
        assert_eq!(all, (0..MAX_COMMON_DOCUMENTS).collect::<Vec<_>>());
        indices.free(vec![5, 9]);
        assert_eq!([indices.take(), indices.take(), indices.take()], [Some(9), Some(5), None]);
    }
}
