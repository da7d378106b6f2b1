"""Records of the events that a run's server received: written during the run, read to replay it."""

from hybridtrain.engine.recording.record_file import Record
from hybridtrain.engine.recording.record_reader import find_record, read_record, service_times

__all__ = ["Record", "find_record", "read_record", "service_times"]
