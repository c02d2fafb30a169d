//! Unmodified guest agents other than cloud-init apply the record. Each runs in its own root file system.

mod afterburn;
mod clouds;
mod google;
mod ignition;
mod net_utils;
mod node;
mod tools;
