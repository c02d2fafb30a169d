//! The root `/`, which belongs to no dialect.

use super::gce;
use super::route_builder::{RouteBuilder, TEXT};
use crate::http::Response;
use crate::record::{Dialect, Record};
use crate::store::{EVERY_DIALECT, LiveOutcome, LiveRequest, LiveRoute, Methods};

/// Names that `/` lists: every date that EC2 has used as a version of its tree. Several clients recognise a metadata
/// service by a non-empty 200 at `/`.
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

/// Adds `/` for every record; `serve.gce_root` gives it to GCE.
pub(super) fn render(record: &Record, sheet: &mut RouteBuilder<'_>) {
    let has_gce = record.serve.serves(Dialect::Gce);
    if record.serve.gce_root && has_gce {
        sheet.begin(Dialect::Gce.as_str());
        let google = gce::root(sheet);
        return sheet.open("/", google);
    }
    sheet.begin(EVERY_DIALECT);
    let versions = sheet.found(TEXT, VERSIONS.join("\n"));
    if has_gce {
        let google = gce::root(sheet);
        sheet.live("/", Methods::READ, &[], Root { versions, google });
    } else {
        sheet.open("/", versions);
    }
}

/// Returns GCE's root, by which Google's client libraries recognise GCE, to requests with the field `Metadata-Flavor`.
/// Other requests get the list of versions.
#[derive(Debug)]
struct Root {
    versions: Response,
    google: Response,
}

impl LiveRoute for Root {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        if gce::FLAVOUR.holds(call) { self.google.clone().into() } else { self.versions.clone().into() }
    }

    fn about(&self) -> &'static str {
        "the versions of EC2's tree; GCE's root for requests with Metadata-Flavor"
    }
}
