"""``task=word2vec`` and ``task=glove``: word vectors from text files of any size.

Text is read twice: once to count words, once to write their numbers to a file that epochs read
(:mod:`~hybridtrain.tasks.words.text_data`). Where workers share parameters, a compiled function
steps them in place; elsewhere torch's sparse gradients do.
"""
