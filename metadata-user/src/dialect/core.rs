//! What belongs to no dialect: `/`.

use super::sheet::Sheet;
use crate::record::{Dialect, Record};
use crate::store::EVERY_DIALECT;

/// What `/` lists: the dates EC2 ever used for a version of its tree. Several clients take a non-empty 200
/// here as the sign that a metadata service is there at all.
const VERSIONS: [&str; 26] = [
    "1.0",
    "2007-01-19",
    "2007-03-01",
    "2007-08-29",
    "2007-10-10",
    "2007-12-15",
    "2008-02-01",
    "2008-09-01",
    "2009-04-04",
    "2011-01-01",
    "2011-05-01",
    "2012-01-12",
    "2014-02-25",
    "2014-11-05",
    "2015-10-20",
    "2016-04-19",
    "2016-06-30",
    "2016-09-02",
    "2018-03-28",
    "2018-08-17",
    "2018-09-24",
    "2019-10-01",
    "2020-10-27",
    "2021-01-03",
    "2021-03-23",
    "latest",
];

/// Adds `/`, whichever dialects are served, unless it is to be GCE's.
pub(super) fn render(record: &Record, sheet: &mut Sheet<'_>) {
    if !(record.serve.gce_root && record.serve.serves(Dialect::Gce)) {
        sheet.begin(EVERY_DIALECT);
        sheet.text("/", VERSIONS.join("\n"));
    }
}
